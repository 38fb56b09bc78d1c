"""Reward functions that other processes can import."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from penstock.envs.rewards import Rubric

WAIT_S = 60.0


def picky(prompts: Any, completions: Sequence[str]) -> list[float | None]:
    """Hangs, raises, exits or abstains, as the completion says."""
    for completion in completions:
        if completion == "hang":
            threading.Event().wait(WAIT_S)
        if completion == "raise":
            raise ValueError("cannot be judged")
        if completion == "exit":
            os._exit(3)
    return [None if completion == "none" else 1.0 for completion in completions]


def picky_rubric() -> Rubric:
    return Rubric([picky])
