"""Several environments as one, in fixed proportions, deterministic to the last prompt.

Positions are divided into blocks. Every block contains each part in proportion to its weight, in a shuffled order, so
the proportions are exact over every block, and a part's own position follows from the block number alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from penstock.envs.cursor import draw
from penstock.envs.protocol import GoBack, Prompt, TextEnvironment
from penstock.envs.rewards import call_by_name
from penstock.errors import ConfigError, LocalProtocolError

PART_COLUMN = "environment"
"""The column with the name of a prompt's part."""

_BLOCK = 100


class Mixture:
    """A text environment of weighted parts. A finite part starts again when it ends, so the mixture is endless."""

    def __init__(self, parts: Mapping[str, tuple[TextEnvironment, float]], *, seed: int = 0) -> None:
        if not parts:
            raise ConfigError("a mixture needs at least one environment, found none")
        bad = {name: weight for name, (_, weight) in parts.items() if not weight > 0}
        if bad:
            raise ConfigError(f"mixture weights must be positive, found {bad}")
        self.seed = seed
        self.names = tuple(parts)
        self.environments = {name: environment for name, (environment, _) in parts.items()}
        self.shares = _shares([weight for _, weight in parts.values()])
        self._deal = lru_cache(maxsize=64)(self._dealt)

    @property
    def count(self) -> None:
        return None

    @property
    def alphabet(self) -> str:
        """All characters of all parts, for character tokenizers; empty if a part has no `alphabet`."""
        alphabets = [getattr(environment, "alphabet", "") for environment in self.environments.values()]
        return "".join(sorted(set("".join(alphabets)))) if all(alphabets) else ""

    def hold_out(self, count: int) -> Mixture:
        """Raises ConfigError: another seed would repeat the rows of a finite part."""
        raise ConfigError(
            "a mixture cannot hold prompts out for evaluation: name another environment in evaluation.env"
        )

    def place(self, position: int) -> tuple[str, int]:
        """The part at `position`, and the position in that part."""
        block, offset = divmod(position, sum(self.shares))
        part, rank = self._deal(block)[offset]
        return self.names[part], block * self.shares[part] + rank

    def prompt(self, position: int) -> Prompt:
        name, own = self.place(position)
        environment = self.environments[name]
        prompt = environment.prompt(own % environment.count if environment.count else own)
        return msgspec.structs.replace(prompt, columns={**prompt.columns, PART_COLUMN: name})

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        rewards: list[float | None] = [None] * len(completions)
        for name, chosen in self._rows_by_part(columns, len(completions)).items():
            own = {
                column: [values[row] for row in chosen] for column, values in columns.items() if column != PART_COLUMN
            }
            shown = [prompts[row] for row in chosen], [completions[row] for row in chosen]
            scored = call_by_name(self.environments[name].score, *shown, own)
            for row, reward in zip(chosen, scored, strict=True):
                rewards[row] = reward
        return rewards

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | GoBack | None:
        environment = self.environments[prompt.columns[PART_COLUMN]]
        reply = getattr(environment, "reply", None)
        return None if reply is None else reply(prompt, completions)

    def _rows_by_part(self, columns: Mapping[str, Sequence[Any]], rows: int) -> dict[str, list[int]]:
        parts = columns.get(PART_COLUMN)
        if parts is None or len(parts) != rows:
            raise LocalProtocolError(f"a mixture scores only its own prompts: the column {PART_COLUMN!r} is missing")
        chosen: dict[str, list[int]] = {}
        for row, name in enumerate(parts):
            chosen.setdefault(name, []).append(row)
        return chosen

    def _dealt(self, block: int) -> tuple[tuple[int, int], ...]:
        """For every position in the block: the part, and the index among the positions of that part."""
        cards = [part for part, share in enumerate(self.shares) for _ in range(share)]
        # A part's own prompts keep their order inside a block: only the interleaving is shuffled.
        ranks = [itertools.count() for _ in self.shares]
        order = sorted(range(len(cards)), key=lambda card: draw(self.seed, block, card + 1))
        return tuple((cards[card], next(ranks[cards[card]])) for card in order)

    def __repr__(self) -> str:
        return f"Mixture({dict(zip(self.names, self.shares, strict=True))}, seed={self.seed})"


def _shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights, by largest remainder; every part gets at least one."""
    total = sum(weights)
    block = max(_BLOCK, len(weights))
    exact = [weight / total * block for weight in weights]
    shares = [max(int(share), 1) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: exact[part] - int(exact[part]), reverse=True)
    for part in by_remainder[: max(block - sum(shares), 0)]:
        shares[part] += 1
    return shares
