"""Prompts from the rows of a dataset: JSON lines, or a table, directory or hub name that `datasets` reads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
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

TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""Files that `datasets` reads, by suffix. All other files are JSON lines."""


class Dataset:
    """A text environment over rows, shuffled in each epoch. A position of the stream is a row."""

    def __init__(
        self,
        *,
        path: str,
        split: str = "train",
        subset: str | None = None,
        columns: Mapping[str, str] | None = None,
        system: str = "",
        rewards: Sequence[str] = ("exact_answer",),
        reward_weights: Sequence[float] | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """`path` is a file, a directory saved by `datasets`, or a name on the hub (with `split` and `subset`).
        `columns` maps `prompt`, `answer` and the like to the names of its columns. `system` begins each prompt."""
        self.path, self.system = path, system
        self.columns = dict(columns or {})
        self.rubric = Rubric([find_reward(name) for name in rewards], reward_weights or None)
        self.table = _table(path, split, subset)
        self.first_row = 0
        try:
            if not len(self.table):
                raise ConfigError(f"dataset {path!r} has no rows")
            self.cursor = Cursor(len(self.table), seed, epochs=epochs, shuffle=shuffle)
            self.row(0)
        except (ConfigError, RunFailed) as error:
            self.close()
            raise ConfigError(error.message) from error

    @property
    def count(self) -> int | None:
        return self.cursor.count

    @property
    def rows(self) -> int:
        """Rows of one pass; the stream continues after it."""
        return self.cursor.rows

    def hold_out(self, count: int) -> Dataset:
        """The last `count` rows, in their order; removes them from this dataset."""
        cursor, left = self.cursor, self.cursor.rows - count
        if left < 1:
            raise ConfigError(
                f"dataset {self.path!r} has {cursor.rows} rows; {count} of them cannot be kept for evaluation"
            )
        held_out = copy.copy(self)  # of the same table
        held_out.first_row, held_out.cursor = self.first_row + left, Cursor(count, cursor.seed, shuffle=False)
        self.cursor = Cursor(left, cursor.seed, epochs=cursor.epochs, shuffle=cursor.shuffle)
        return held_out

    def prompt(self, position: int) -> Prompt:
        return self.row(self.first_row + self.cursor.row(position))

    def row(self, number: int) -> Prompt:
        """The prompt of one row; the error for an invalid one names the dataset and the row."""
        where = f"{self.path}, row {number + 1}"
        try:
            found = dict(self.table[number])
        except DAMAGED as error:
            raise RunFailed(
                f"{where}: expected a line with one JSON object in UTF-8, found something else: {error}"
            ) from error
        columns = dict(found)
        for name, own in self.columns.items():
            if own not in found:
                raise RunFailed(f"{where}: there is no column {own!r}; the row's columns are {', '.join(found)}")
            columns[name] = found[own]
        return _prompt_of(columns, self.system, where)

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return self.rubric(prompts, completions, **columns)

    def close(self) -> None:
        """Closes the file, if one is open."""
        if isinstance(self.table, JsonLines):
            self.table.close()

    def __repr__(self) -> str:
        return f"Dataset({self.path!r}, {self.cursor}, {self.rubric})"


class JsonLines:
    """The objects of a file, one per line, read on demand."""

    def __init__(self, path: str) -> None:
        try:
            self._starts = _row_starts(path)
            self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(f"dataset {path!r} cannot be read: {error.strerror or error}") from error
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        with self._lock:
            self._file.seek(start)
            line = self._file.read(end - start)
        return msgspec.json.decode(line, type=dict[str, Any])

    def close(self) -> None:
        self._file.close()


def _prompt_of(columns: dict[str, Any], system: str, where: str) -> Prompt:
    """The prompt is in the column `prompt`; the other columns are for rewards."""
    shown = columns.pop("prompt", None)
    begins = (Message("system", system),) if system else ()
    if isinstance(shown, str) and shown:
        messages = (*begins, Message("user", shown)) if begins else ()
        return Prompt(text="" if messages else shown, messages=messages, columns=columns)
    reason = ""
    try:
        messages = msgspec.convert(shown, tuple[Message, ...])
    except msgspec.ValidationError as error:
        messages, reason = (), f" ({error})" if isinstance(shown, list) else ""
    if not messages:
        raise RunFailed(
            f"{where}: the column 'prompt' must be a text or a list of messages with 'role' and 'content', found "
            f"{type(shown).__name__}{reason}; the row's columns are {', '.join(columns) or 'none'}. If the prompt is "
            "in another column, name it: columns = { prompt = '...' }"
        )
    return Prompt(messages=(*begins, *messages), columns=columns)


def _row_starts(path: str) -> np.ndarray:
    """Where each non-empty line begins, and where the last one ends."""
    data = np.fromfile(path, dtype=np.uint8)
    ends = np.flatnonzero(data == ord("\n")) + 1
    if len(data) and (not len(ends) or ends[-1] != len(data)):
        ends = np.append(ends, len(data))
    starts = np.concatenate([[0], ends])
    # A blank line would be a row without a prompt: merge it into the line before, which stays readable.
    lengths = np.diff(starts)
    keep = np.concatenate([lengths > 1, [True]])
    return starts[keep]


def _table(path: str, split: str, subset: str | None) -> Any:
    """A sequence of the rows."""
    place = Path(path)
    if place.suffix in TABLES and not place.exists():
        raise ConfigError(f"dataset {path!r} cannot be read: No such file or directory")
    if place.suffix in (".jsonl", ".json") or (place.is_file() and place.suffix not in TABLES):
        return JsonLines(path)
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"dataset {path!r} is no file of JSON lines; others need the extra `data`: pip install 'penstock-rl[data]'"
        ) from error
    try:
        if place.is_dir() and (place / "dataset_info.json").exists():
            return datasets.load_from_disk(path)
        if place.suffix in TABLES:
            return datasets.load_dataset(TABLES[place.suffix], data_files=path, split="train")
        return datasets.load_dataset(path, subset, split=split)
    except Exception as error:
        raise ConfigError(f"dataset {path!r} cannot be read: {type(error).__name__}: {error}") from error
