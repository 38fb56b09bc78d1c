"""Files of a directory that may come from a stranger: read and written without following a link.

The directory is the caller's choice. Below it, neither a folder on the way nor the file itself may be a link: it could
lead to any file of the user. Each folder is opened from the one above, so a link that appears meanwhile does not count
either. Libraries that open files by path are preceded by `check`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def open_beneath(root: Path, path: Path) -> BinaryIO:
    """Opens a plain file for reading. Raises `OSError` for a link or a special file, which could block."""
    with _folder(root, path) as (folder, name):
        descriptor = _open(name, os.O_RDONLY | os.O_NONBLOCK, folder, path)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_beneath(root: Path, path: Path) -> bytes:
    with open_beneath(root, path) as file:
        return file.read()


def write_beneath(root: Path, path: Path, content: bytes) -> None:
    """Replaces the file, and whatever else has its name: readers see the old content or the new, never a part. Makes
    the folders that are missing."""
    with _folder(root, path, make=True) as (folder, name):
        temporary = f".{name}.{secrets.token_hex(4)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def files_beneath(root: Path, pattern: str) -> list[Path]:
    """The plain files that match, such as `logs/*.log`, in order."""
    return sorted(path for path in root.glob(pattern) if _first_link(root, path) is None and path.is_file())


def check_beneath(root: Path, *paths: Path) -> None:
    """Raises `OSError` if a path, or a folder on the way to it, is a link. Missing ones are none."""
    for path in paths:
        if link := _first_link(root, path):
            raise _refused(link)


def _first_link(root: Path, path: Path) -> Path | None:
    way = [path, *path.parents]
    return next((one for one in reversed(way[: way.index(root)]) if one.is_symlink()), None)


@contextlib.contextmanager
def _folder(root: Path, path: Path, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The opened folder of the file, and the name of the file in it."""
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ()
    if not parts or ".." in parts or "\0" in str(path):
        raise OSError(errno.EINVAL, f"this is no file in {root}", str(path))
    *folders, name = parts
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=descriptor)
            inner = _open(folder, os.O_RDONLY | os.O_DIRECTORY, descriptor, path)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, name
    finally:
        os.close(descriptor)


def _open(name: str, flags: int, folder: int, path: Path) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, folder):
            raise _refused(path) from None
        error.filename = str(path)
        raise


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _refused(path: Path) -> OSError:
    return OSError(errno.ELOOP, "links are not followed in a run directory, and this is or needs one", str(path))
