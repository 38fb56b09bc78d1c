"""Reads the files of one run directory into the folds, in bounded chunks and each byte once."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from penstock.dashboard import settings_table
from penstock.dashboard.log_lines import warned
from penstock.dashboard.metrics_fold import MetricsFold
from penstock.dashboard.ring_fold import RingFold
from penstock.dashboard.sample_index import Row, SampleIndex
from penstock.dashboard.verdict import Evidence, PipelineFacts, Verdict, judge
from penstock.dashboard.views import Folds
from penstock.errors import ConfigError, PenstockError
from penstock.journal.reader import history, newest_seq
from penstock.journal.schema import Entry
from penstock.records.ids import POOL
from penstock.runtime.following import Following
from penstock.runtime.rundir import RunDir

EVENTS_AT_ONCE = 2000
LOG_BYTES_AT_FIRST = 1 << 20
TAIL_BYTES = 64 << 10
LONG_BYTES = 1 << 20
"""Larger metrics take long to read: their last lines are read first."""
MOST_SAMPLE_BYTES = 4 << 20

_decode: Callable[[bytes], dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any]).decode


class RunReader:
    """One run, as far as its files have been read. Safe for use from several threads."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir.open(root)
        self.folds = Folds()
        self.lock = threading.RLock()
        self._configured: tuple[PipelineFacts, ...] = ()
        self.settings: dict[str, str] = {}
        """The configuration, key by key."""
        self.stall_after_s = math.inf
        self.seq = 0
        self.journal_trouble = ""
        """The reason why the journal cannot be read."""
        self.unread_events = 0
        self.samples: dict[str, SampleIndex] = {}
        self._sample_files: dict[str, Following] = {}
        self._metrics = Following(self.run.metrics_path)
        if _size(self.run, self.run.metrics_path) > LONG_BYTES:
            self.folds.tail = MetricsFold()
            self.folds.tail.take(tail_of(self.run, self.run.metrics_path, LONG_BYTES).splitlines())
        self._logs: dict[str, Following] = {}
        self._newest_seq = 0
        self._config_at = 0.0
        self._refreshed_at = 0.0
        self._caught_up = False
        """The last refresh read all complete lines and events."""

    def __repr__(self) -> str:
        return f"<RunReader {self.run.root.name}: event {self.seq}, {self.folds.metrics}>"

    # -- reading --------------------------------------------------------------------------------------------------

    def refresh_if_due(self, every_s: float, budget_s: float) -> None:
        """Refreshes unless all was read less than `every_s` ago: several pages of one run read its files once."""
        with self.lock:
            if time.monotonic() - self._refreshed_at >= every_s or not self._caught_up:
                self.refresh(budget_s)

    def refresh(self, budget_s: float) -> bool:
        """Reads for about `budget_s`; returns True when all that is on disk has been read."""
        with self.lock:
            self._refreshed_at = time.monotonic()
            until = self._refreshed_at + budget_s
            self._read_config()
            self._discover()
            while True:
                read = [self._read_metrics(), self._read_journal(), self._read_samples(), self._read_logs()]
                self._caught_up = not any(read)
                if self._caught_up:
                    self.folds.tail = None
                if self._caught_up or time.monotonic() >= until:
                    return self._caught_up

    def share_read(self) -> float:
        """Share of the files that has been read, from 0 to 1: by bytes of metrics and by events."""
        with self.lock:
            if self._caught_up:
                return 1.0
            size = _size(self.run, self.run.metrics_path)
            shares = [self._metrics.offset / size if size else 1.0]
            if self._newest_seq:
                shares.append(self.seq / self._newest_seq)
            return min(1.0, *shares)

    @property
    def revision(self) -> str:
        """A string that changes when there is new data to draw."""
        logs = sum(log.offset for log in self._logs.values())
        return f"{self._metrics.offset}.{self.seq}.{logs}.{sum(len(index.rows) for index in self.samples.values())}"

    def _read_metrics(self) -> bool:
        lines = self._metrics.read()
        self.folds.metrics.take(lines)
        return bool(lines)

    def _read_journal(self) -> bool:
        path = self.run.journal_path
        if not path.exists():
            return False
        count = 0
        try:
            self._newest_seq = newest_seq(path)
            if self._newest_seq > self.seq:
                with contextlib.closing(history(path, self.seq)) as entries:
                    for entry in itertools.islice(entries, EVENTS_AT_ONCE):
                        self._take(entry)
                        count += 1
            self.journal_trouble = ""
        except PenstockError as error:
            self.journal_trouble = error.message
        for ring in self.folds.rings.values():
            ring.settle()
        return count > 0

    def _take(self, entry: Entry) -> None:
        """An event of another version of Penstock may lack expected fields: it is counted and skipped."""
        self.seq = entry.seq
        try:
            event = _decode(entry.body)
            notes = _decode(entry.decided) if entry.decided else {}
            if entry.pipeline == POOL:
                self.folds.lanes.take(entry.at, event, notes)
                return
            ring = self.folds.rings.get(entry.pipeline)
            if ring is None:
                ring = self.folds.rings[entry.pipeline] = RingFold(entry.pipeline)
            ring.take(entry.at, event, notes)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError):
            self.unread_events += 1

    def _read_samples(self) -> bool:
        read = False
        for name, following in self._sample_files.items():
            offset = following.offset
            lines = following.read()
            self.samples[name].take(offset, lines)
            read = read or bool(lines)
        return read

    def _read_logs(self) -> bool:
        read = False
        for following in self._logs.values():
            lines = following.read()
            self.folds.warnings.extend(warned(lines))
            read = read or bool(lines)
        return read

    def _discover(self) -> None:
        """Finds new logs and sample files. A log is read from its last megabyte on."""
        for path in self.run.files("logs/*.log"):
            if path.stem not in self._logs:
                first = max(0, _size(self.run, path) - LOG_BYTES_AT_FIRST)
                self._logs[path.stem] = Following(path, first, root=self.run.root)
        for path in self.run.files("rollouts/*/*.jsonl"):
            name = f"{path.parent.name}/{path.stem}"
            if name not in self._sample_files:
                self._sample_files[name] = Following(path, root=self.run.root)
                self.samples[name] = SampleIndex()

    def _read_config(self) -> None:
        """A resumed run may have a changed one. If it cannot be read, the pipelines are those of the journal."""
        try:
            with self.run.open_file(self.run.config_path) as file:
                changed_at = os.fstat(file.fileno()).st_mtime
                if changed_at == self._config_at:
                    return
                config = tomllib.load(file)
            self.settings = settings_table.rows(config)
            self._configured = tuple(_facts(section) for section in config.get("pipeline", ()))
            self.stall_after_s = float(config["control"]["stall_after_s"])
            self._config_at = changed_at
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            return

    # -- answering ------------------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> tuple[PipelineFacts, ...]:
        return self._configured or tuple(PipelineFacts(name) for name in self.folds.rings)

    def pipeline(self, name: str) -> PipelineFacts:
        for one in self.pipelines:
            if one.name == name:
                return one
        raise ConfigError(f"this run has no pipeline {name!r}; it has {', '.join(one.name for one in self.pipelines)}")

    def failure_reports(self) -> dict[str, str]:
        reports = {}
        for path in self.run.files("failures/*.json"):
            try:
                reports[path.stem] = str(json.loads(self.run.read(path))["message"])
            except (OSError, ValueError, KeyError, TypeError):
                reports[path.stem] = "its failure report cannot be read"
        return reports

    def verdict(self) -> Verdict:
        latest = self.folds.latest
        return judge(
            Evidence(
                directory=str(self.run.root),
                pipelines=self.pipelines,
                ending=ending_of(self.run),
                alive=self.run.is_supervised(),
                failure_reports=self.failure_reports(),
                steps=latest.trained(),
                gauges=latest.gauges,
                stalls={name: ring.stalled for name, ring in self.folds.rings.items() if ring.stalled},
                failed=next((ring.failed for ring in self.folds.rings.values() if ring.failed), ""),
                silent_s=silent_s(self.run),
                stall_after_s=self.stall_after_s,
            )
        )

    def logs(self) -> list[str]:
        return sorted(self._logs)

    def log_tail(self, process: str) -> str:
        """The last lines of one process's log."""
        if process not in self._logs:
            raise ConfigError(f"there is no log of {process!r}; there are {', '.join(self.logs())}")
        return tail_of(self.run, self.run.log_path(process), TAIL_BYTES).decode("utf-8", "replace")

    def source(self, name: str) -> SampleIndex:
        if name not in self.samples:
            raise ConfigError(f"there are no samples {name!r}; there are {', '.join(self.samples) or 'none'}")
        return self.samples[name]

    def read_sample(self, name: str, row: Row) -> dict[str, Any]:
        """The whole line of one sample, read at its offset in the file."""
        pipeline, _, stem = name.partition("/")
        if row.size > MOST_SAMPLE_BYTES:
            raise ConfigError(f"sample {row.sample} is {row.size} bytes long, too long to be shown")
        with self.run.open_file(self.run.rollouts(pipeline) / f"{stem}.jsonl") as file:
            file.seek(row.offset)
            return orjson.loads(file.read(row.size))


def silent_s(run: RunDir) -> float | None:
    """Seconds since the last line was written; None if there is none. (Reading a journal touches its files.)"""
    written = [*run.files(run.metrics_path.name), *run.files("logs/*.log")]
    times = [path.stat(follow_symlinks=False).st_mtime for path in written]
    return max(0.0, time.time() - max(times)) if times else None


def ending_of(run: RunDir) -> dict[str, Any] | None:
    """The ending that the supervisor wrote, or None if it cannot be read."""
    try:
        return run.read_ending()
    except (OSError, PenstockError):
        return None


def _facts(section: dict[str, Any]) -> PipelineFacts:
    return PipelineFacts(
        name=str(section["name"]),
        steps=section.get("steps"),
        max_staleness=section.get("train", {}).get("max_staleness"),
        workers=section.get("rollout", {}).get("workers"),
    )


def tail_of(run: RunDir, path: Path, most_bytes: int) -> bytes:
    """The last whole lines of a file of the run, at most `most_bytes`."""
    with run.open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most_bytes))
        text = file.read(most_bytes)
    return text[text.find(b"\n") + 1 :] if size > most_bytes else text


def _size(run: RunDir, path: Path) -> int:
    try:
        with run.open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return 0
