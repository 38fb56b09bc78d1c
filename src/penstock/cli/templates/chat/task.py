"""Sums, asked in plain English. The model's own chat template is used."""

import re

import numpy as np

from penstock import Message, Prompt


class Sums:
    count = None

    def __init__(self, seed=0):
        self.seed = seed

    def prompt(self, position):
        left, right = np.random.default_rng([self.seed, position]).integers(1, 11, 2)
        question = Message("user", f"What is {left} + {right}? Answer with the number only.")
        return Prompt(messages=(question,), columns={"answer": str(left + right)})

    def score(self, prompts, completions, *, answer, **columns):
        """1 for the number alone, half of that for the number among other words."""
        return [
            1.0 if text.strip().rstrip(".") == right else 0.5 if right in re.findall(r"\d+", text) else 0.0
            for text, right in zip(completions, answer)
        ]
