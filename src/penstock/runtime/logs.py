"""Where the lines of a process go: its own file in the run directory, warnings also to standard error."""

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
    """A log that cannot be written (a full disk, say) is reported once, not once for every line."""

    complained = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.complained:
            self.complained = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


def rotate(folder: Path, max_bytes: int) -> list[str]:
    """Moves what is in logs larger than `max_bytes` to `NAME.log.1`; gives their names.

    Processes have the file open for appending, so it is copied and emptied: they go on at its beginning. What is
    written in between is lost.
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
        except OSError as error:  # it is gone, or the disk is full
            logging.getLogger(__name__).warning("%s could not be rotated: %s", path, error)
            continue
        rotated.append(path.name)
    return rotated


LINE = "%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s"


def configure(
    role: str, path: Path | str | None = None, level: str | int = "INFO", *, warnings_shown: bool = True
) -> None:
    """Sends every line to `path` and, if they are to be shown, warnings to standard error; without a path, everything
    to standard error.

    Also arms the fault handler: a crash in native code, or SIGUSR1 at any time, writes the stacks of all threads to
    the same place as the lines. Calling it again replaces what the earlier call set up.
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
