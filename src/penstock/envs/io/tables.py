"""Prompts from tables: Hugging Face `datasets` by name or path, parquet, arrow, CSV, JSON lines. Needs `datasets`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.envs.cursor import Cursor
from penstock.envs.io.datasets import prompt_of_row
from penstock.envs.protocol import Prompt
from penstock.envs.registry import find_reward
from penstock.envs.rewards import Rubric
from penstock.errors import ConfigError, RunFailed

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".csv": "csv"}


class TableDataset:
    """A text environment over the rows of a table, each epoch in an order of its own. A prompt is a row's position."""

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
        """`path` is a file, a directory saved by `datasets`, or a name on the hub. `columns` maps `prompt`, `answer`
        and whatever else rewards ask for to the table's own names. With `system` the prompts are chat messages."""
        self.path, self.system = path, system
        self.columns = dict(columns or {})
        self.rubric = Rubric([find_reward(name) for name in rewards], reward_weights or None)
        self.table = _table(path, split, subset)
        missing = sorted(set(self.columns.values()) - set(self.table.column_names))
        if missing:
            known = ", ".join(self.table.column_names)
            raise ConfigError(f"dataset {path!r} has no column {missing[0]!r}; it has {known}")
        if not len(self.table):
            raise ConfigError(f"dataset {path!r} has no rows")
        self.cursor = Cursor(len(self.table), seed, epochs=epochs, shuffle=shuffle)
        self.first_row = 0
        try:
            self.row(0)
        except RunFailed as error:
            raise ConfigError(error.message) from error

    @property
    def count(self) -> int | None:
        return self.cursor.count

    @property
    def rows(self) -> int:
        """Of one pass; the stream goes on after it."""
        return self.cursor.rows

    def hold_out(self, count: int) -> TableDataset:
        """The last `count` rows, in their order; this dataset goes on without them."""
        cursor, left = self.cursor, self.cursor.rows - count
        if left < 1:
            raise ConfigError(
                f"dataset {self.path!r} has {cursor.rows} rows; {count} of them cannot be kept for evaluation"
            )
        held_out = copy.copy(self)
        held_out.first_row, held_out.cursor = self.first_row + left, Cursor(count, cursor.seed, shuffle=False)
        self.cursor = Cursor(left, cursor.seed, epochs=cursor.epochs, shuffle=cursor.shuffle)
        return held_out

    def prompt(self, position: int) -> Prompt:
        return self.row(self.first_row + self.cursor.row(position))

    def row(self, number: int) -> Prompt:
        """The prompt of one row; the error for a bad one names the table and the row."""
        row = dict(self.table[number])
        for name, own in self.columns.items():
            row[name] = self.table[number][own]
        prompt = prompt_of_row(row, "prompt", f"{self.path}, row {number + 1}")
        if not self.system:
            return prompt
        shown: Any = prompt.shown()
        said = [{"role": "user", "content": shown}] if isinstance(shown, str) else shown
        messages = [{"role": "system", "content": self.system}, *said]
        return prompt_of_row({**prompt.columns, "prompt": messages}, "prompt", self.path)

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return self.rubric(prompts, completions, **columns)

    def __repr__(self) -> str:
        return f"TableDataset({self.path!r}, {self.cursor}, {self.rubric})"


def _table(path: str, split: str, subset: str | None) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("env.name = 'dataset' needs the extra `data`: pip install 'penstock[data]'") from error
    place = Path(path)
    try:
        if place.is_dir() and (place / "dataset_info.json").exists():
            return datasets.load_from_disk(path)
        if place.suffix in KINDS:
            if not place.exists():
                raise ConfigError(f"dataset {path!r} cannot be read: there is no such file")
            return datasets.load_dataset(KINDS[place.suffix], data_files=path, split="train")
        return datasets.load_dataset(path, subset, split=split)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"dataset {path!r} cannot be read: {type(error).__name__}: {error}") from error
