"""Prompts from a file of JSON lines: one object per line, with a `prompt` (text or chat messages) and other columns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.envs.cursor import Cursor
from penstock.envs.protocol import Message, Prompt
from penstock.envs.registry import find_reward
from penstock.envs.rewards import Rubric
from penstock.errors import ConfigError, RunFailed
from penstock.wire.codec import DAMAGED


class JsonLinesDataset:
    """A text environment over the rows of a file, each epoch in an order of its own. Rows are read when asked for."""

    def __init__(
        self,
        *,
        path: str,
        rewards: Sequence[str] = ("exact_answer",),
        reward_weights: Sequence[float] | None = None,
        prompt_column: str = "prompt",
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.path = Path(path)
        self.prompt_column = prompt_column
        self.rubric = Rubric([find_reward(name) for name in rewards], reward_weights or None)
        self._starts = _row_starts(self.path)
        if len(self._starts) < 2:
            raise ConfigError(f"dataset {path!r} has no rows")
        self.cursor = Cursor(len(self._starts) - 1, seed, epochs=epochs, shuffle=shuffle)
        self.first_row = 0
        self._lock = threading.Lock()
        self._file = self.path.open("rb")
        try:
            self.row(0)
        except RunFailed as error:
            self._file.close()
            raise ConfigError(error.message) from error

    @property
    def count(self) -> int | None:
        return self.cursor.count

    @property
    def rows(self) -> int:
        """Of one pass; the stream goes on after it."""
        return self.cursor.rows

    def hold_out(self, count: int) -> JsonLinesDataset:
        """The last `count` rows of the file, in their order; this dataset goes on without them."""
        cursor = self.cursor
        left = cursor.rows - count
        if left < 1:
            raise ConfigError(
                f"dataset {str(self.path)!r} has {cursor.rows} rows; {count} of them cannot be kept for evaluation"
            )
        held_out = copy.copy(self)  # the file is read under one lock
        held_out.first_row, held_out.cursor = self.first_row + left, Cursor(count, cursor.seed, shuffle=False)
        self.cursor = Cursor(left, cursor.seed, epochs=cursor.epochs, shuffle=cursor.shuffle)
        return held_out

    def prompt(self, position: int) -> Prompt:
        return self.row(self.first_row + self.cursor.row(position))

    def row(self, number: int) -> Prompt:
        """The prompt of one line of the file; the error for a bad one names the file and the line."""
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        with self._lock:
            self._file.seek(start)
            line = self._file.read(end - start)
        where = f"{self.path}, row {number + 1}"
        try:
            columns = msgspec.json.decode(line, type=dict[str, Any])
        except DAMAGED as error:
            raise RunFailed(f"{where}: expected a JSON object in UTF-8, found something else: {error}") from error
        return prompt_of_row(columns, self.prompt_column, where)

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return self.rubric(prompts, completions, **columns)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __repr__(self) -> str:
        return f"JsonLinesDataset({str(self.path)!r}, {self.cursor}, {self.rubric})"


def prompt_of_row(columns: dict[str, Any], prompt_column: str, where: str) -> Prompt:
    """The prompt of one row, which stands in one of its columns; the others are for rewards."""
    shown = columns.pop(prompt_column, None)
    if isinstance(shown, str) and shown:
        return Prompt(text=shown, columns=columns)
    try:
        messages = msgspec.convert(shown, tuple[Message, ...])
    except msgspec.ValidationError:
        messages = ()
    if not messages:
        raise RunFailed(
            f"{where}: the column {prompt_column!r} must be a text or a list of messages with 'role' and "
            f"'content', found {type(shown).__name__}; the row's columns are {', '.join(columns) or 'none'}"
        )
    return Prompt(messages=messages, columns=columns)


def _row_starts(path: Path) -> np.ndarray:
    """Where each non-empty line begins, and where the last one ends."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise ConfigError(f"dataset {str(path)!r} cannot be read: {error.strerror or error}") from error
    ends = np.flatnonzero(data == ord("\n")) + 1
    if len(data) and (not len(ends) or ends[-1] != len(data)):
        ends = np.append(ends, len(data))
    starts = np.concatenate([[0], ends])
    # A blank line would be a row without a prompt; merging it into the line before leaves that row readable.
    lengths = np.diff(starts)
    keep = np.concatenate([lengths > 1, [True]])
    return starts[keep]
