"""Penstock: a runtime for asynchronous reinforcement-learning post-training."""

__version__ = "0.1.0"
