"""Logging of a process: to its file in the run directory, warnings also to standard error."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TextIO, cast


class LogFile(logging.FileHandler):
    """Reports a log that cannot be written (for example on a full disk) once, not once per line."""

    reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.reported:
            self.reported = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


def rotate(folder: Path, max_bytes: int) -> list[str]:
    """Moves the last `max_bytes` of each larger log to `NAME.log.1`; returns the names of these logs.

    Processes have the file open for appending, so it is copied and truncated: they continue at its start. Lines that
    are written in between, and those before the last `max_bytes`, are lost.
    """
    rotated: list[str] = []
    for path in sorted(folder.glob("*.log")):
        try:
            if path.is_symlink() or path.stat().st_size <= max_bytes:
                continue
            with path.open("rb+") as log:
                log.seek(-max_bytes, os.SEEK_END)
                with path.with_name(f"{path.name}.1").open("wb") as kept:
                    shutil.copyfileobj(log, kept)
                log.truncate(0)
        except OSError as error:  # it was deleted, or the disk is full
            logging.getLogger(__name__).warning("%s could not be rotated: %s", path, error)
            continue
        rotated.append(path.name)
    return rotated


LINE = "%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s"


def configure(
    role: str, path: Path | str | None = None, level: str | int = "INFO", *, warnings_shown: bool = True
) -> None:
    """Writes every line to `path`, and warnings to standard error if `warnings_shown`; without a path, all lines to
    standard error.

    Also enables the fault handler: a crash in native code, or SIGUSR1 at any time, writes the stacks of all threads to
    the same place as the lines. A second call replaces the first.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    formatter = logging.Formatter(LINE.format(role=role))
    console = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [console] if warnings_shown or path is None else []
    place: TextIO = sys.stderr
    if path is not None:
        console.setLevel(logging.WARNING)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = LogFile(path, encoding="utf-8")
        handlers.append(file)
        place = cast(TextIO, file.stream)
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    for noisy in ("httpx", "httpcore", "uvicorn", "asyncio", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        faulthandler.enable(place)
        faulthandler.register(signal.SIGUSR1, place, all_threads=True)
    except (ValueError, OSError):  # standard error was replaced by something without a file descriptor
        logging.getLogger(__name__).debug("no fault handler: standard error has no file descriptor")
