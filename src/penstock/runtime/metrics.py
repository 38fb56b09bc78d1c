"""Metrics of a run as a file of JSON lines, readable during the run and afterwards."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger(__name__)

PAUSE_S = 6.0
"""A longer time between two lines of a run: it was interrupted, since gauges are written every 2 s."""


class JsonLines:
    """Appends records to a file in a separate thread: writing never blocks the caller.

    If the disk is so slow that `max_queued` records wait, further ones are dropped and counted. A write error is logged
    once. Lost metrics must not end the run.
    """

    def __init__(self, path: Path | str, *, max_queued: int = 10_000) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(max_queued)
        self.dropped = 0
        self._thread = threading.Thread(target=self._serve, name=f"jsonl-{self._path.stem}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float) -> bool:
        """Writes the queued records; returns False if that took too long."""
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _serve(self) -> None:
        failed = False
        ending = False
        appended = False
        while not ending:
            records = [self._queue.get()]
            while not self._queue.empty():
                records.append(self._queue.get_nowait())
            ending = None in records
            try:
                if not appended:
                    _end_torn_line(self._path)
                with self._path.open("ab") as file:
                    appended = True
                    file.writelines(_line(record) for record in records if record is not None)
                failed = False
            except OSError as error:
                self.dropped += len(records) - ending
                if not failed:
                    logger.warning("cannot write %s: %s; records are dropped until it works again", self._path, error)
                failed = True


def _end_torn_line(path: Path) -> None:
    """Ends the line of a writer that was killed while writing, so that only that line is lost."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _line(record: Mapping[str, Any]) -> bytes:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(record, default=str, option=options)  # one unusual value must not lose the whole record
