"""Index of the saved samples: one row with its offset per line of `rollouts/`, without the texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

MOST_ROWS = 100_000


class Row(NamedTuple):
    """One line of a file of samples."""

    offset: int
    size: int
    step: int
    prompt: int
    sample: int
    version: int
    reward: float
    length: int


class SampleIndex:
    """Index of one file. Beyond `MOST_ROWS` it drops every other row of the older half, so that early steps remain."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.left_out = 0

    def __repr__(self) -> str:
        return f"<SampleIndex of {len(self.rows)} rows, {self.left_out} left out>"

    def take(self, offset: int, lines: Iterable[bytes]) -> None:
        """Adds consecutive lines, without their newlines, that begin at byte `offset` of the file."""
        for line in lines:
            size = len(line)
            try:
                self.rows.append(row_of(offset, size, orjson.loads(line)))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                self.left_out += 1
            offset += size + 1
        if len(self.rows) > MOST_ROWS:
            half = MOST_ROWS // 2
            self.left_out += half // 2
            self.rows[:half] = self.rows[:half:2]

    def choose(
        self,
        *,
        first: int = 0,
        count: int = 20,
        step: int | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> tuple[list[Row], int]:
        """Rows with the newest first, filtered by step and by reward if given; and the number of all such rows."""
        chosen = [
            row
            for row in reversed(self.rows)
            if (step is None or row.step == step)
            and (low is None or row.reward >= low)
            and (high is None or row.reward <= high)
        ]
        return chosen[first : first + count], len(chosen)

    def find(self, sample: int) -> Row | None:
        """The last row of a sample: a repeated step writes it again."""
        return next((row for row in reversed(self.rows) if row.sample == sample), None)


def row_of(offset: int, size: int, record: dict[str, Any]) -> Row:
    return Row(
        offset=offset,
        size=size,
        step=int(record["step"]),
        prompt=int(record["prompt"]),
        sample=int(record["sample"]),
        version=int(record["version"]),
        reward=float(record["reward"]),
        length=int(record.get("length", 0)),
    )
