"""Terminal output: text without control characters, and streams whose loss does not end the process."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


def escape_controls(text: str) -> str:
    """Escapes control characters: those of a sample or an exception must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


class Unbreakable:
    """A stream that may be lost: a closed pipe, a terminal that hung up. Later output is discarded.

    The descriptor is replaced by `/dev/null`, so that the flush at the end of the process does not fail either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self._stream.write(text)
            except (OSError, ValueError):
                self._lose()
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lose()

    def _lose(self) -> None:
        self.lost = True
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)
        except (OSError, ValueError):  # the stream has no descriptor, or the process has none left
            return


def protect_streams() -> None:
    """After this call, printing cannot fail."""
    if not isinstance(sys.stdout, Unbreakable):
        sys.stdout = Unbreakable(sys.stdout)  # type: ignore[assignment]
    if not isinstance(sys.stderr, Unbreakable):
        sys.stderr = Unbreakable(sys.stderr)  # type: ignore[assignment]
