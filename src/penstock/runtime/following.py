"""Reading a file of lines while another process appends to it."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.runtime.beneath import open_beneath

MAX_BYTES = 1 << 20


class Following:
    """Returns each complete line once. Store `offset` to continue from there in another process.

    A file that became shorter was emptied, as a log that is rotated: it is read from its start. No link is followed
    below `root`, by default the file's folder.
    """

    def __init__(self, path: Path, offset: int = 0, *, root: Path | None = None) -> None:
        self._path = path
        self._root = path.parent if root is None else root
        self.offset = offset

    def __repr__(self) -> str:
        return f"<Following {self._path} from byte {self.offset}>"

    def read(self) -> list[bytes]:
        """The next complete lines, about a megabyte at most; empty if there are none."""
        try:
            with open_beneath(self._root, self._path) as file:
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
