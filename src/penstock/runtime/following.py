"""Reading a file of lines while another process appends to it."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 1 << 20


class Following:
    """Returns each complete line once. Store `offset` to continue from there in another process.

    A file that became shorter was emptied, as a log that is rotated: it is read from its start.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset

    def __repr__(self) -> str:
        return f"<Following {self._path} from byte {self.offset}>"

    def read(self) -> list[bytes]:
        """The next complete lines, about a megabyte at most; empty if there are none."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                text = file.read(MAX_BYTES)
                if b"\n" not in text:
                    text += file.readline()  # a single line may be longer
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self.offset += len(complete)
        return complete.splitlines()
