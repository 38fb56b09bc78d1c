"""Built-in verifiable text tasks, small enough for a model of a few hundred thousand parameters.

Each task is endless, names its whole alphabet (so a character tokenizer can be built for it) and the longest right
answer (so generation can be bounded), and gives partial credit per position.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from penstock.envs.cursor import digits
from penstock.envs.protocol import Prompt
from penstock.envs.rewards import inline, matching_positions
from penstock.errors import ConfigError

MARK = ">"
"""Separates the question from the answer."""


class LettersTask:
    """A question of random letters and one right answer, which subclasses define."""

    def __init__(self, *, letters: int = 8, length: int = 4, seed: int = 0) -> None:
        if not 2 <= letters <= 26:
            raise ConfigError(f"letters must be between 2 and 26 (a part of the alphabet), found {letters}")
        if length < 1:
            raise ConfigError(f"length must be at least 1, found {length}")
        self.letters = string.ascii_lowercase[:letters]
        self.length = length
        self.seed = seed

    @property
    def count(self) -> None:
        return None

    @property
    def alphabet(self) -> str:
        """Every character of any prompt or right answer."""
        return self.letters + MARK

    def answer(self, question: str) -> str:
        raise NotImplementedError

    def prompt(self, position: int) -> Prompt:
        question = "".join(self.letters[digit] for digit in digits(self.seed, position, len(self.letters), self.length))
        return Prompt(text=question + MARK, columns={"answer": self.answer(question)})

    @inline
    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return matching_positions(prompts, completions, **columns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(letters={len(self.letters)}, length={self.length}, seed={self.seed})"


class Copy(LettersTask):
    """Repeat the letters."""

    def answer(self, question: str) -> str:
        return question


class Reverse(LettersTask):
    """Repeat the letters backwards."""

    def answer(self, question: str) -> str:
        return question[::-1]


class Sort(LettersTask):
    """Repeat the letters in alphabetical order."""

    def answer(self, question: str) -> str:
        return "".join(sorted(question))


class Arithmetic:
    """Sums, differences and products of two whole numbers below `limit`."""

    def __init__(self, *, limit: int = 10, operations: str = "+-*", seed: int = 0) -> None:
        if limit < 2:
            raise ConfigError(f"limit must be at least 2, found {limit}")
        if not operations or set(operations) - set("+-*"):
            raise ConfigError(f"operations must be some of '+-*', found {operations!r}")
        self.limit = limit
        self.operations = operations
        self.seed = seed

    @property
    def count(self) -> None:
        return None

    @property
    def alphabet(self) -> str:
        return string.digits + "".join(sorted({*self.operations, "-"})) + "="

    def prompt(self, position: int) -> Prompt:
        left, right, choice = digits(self.seed, position, self.limit * len(self.operations), 3)
        left, right, operation = left % self.limit, right % self.limit, self.operations[choice % len(self.operations)]
        answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
        return Prompt(text=f"{left}{operation}{right}=", columns={"answer": str(answer)})

    @inline
    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return matching_positions(prompts, completions, **columns)

    def __repr__(self) -> str:
        return f"Arithmetic(limit={self.limit}, operations={self.operations!r}, seed={self.seed})"
