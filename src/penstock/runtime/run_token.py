"""The run's token: made anew at every start, handed to each process through a pipe, never in a run directory.

Commands beside a live run, such as `doctor`, find it in a private folder of the user's home.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import RunFailed
from penstock.runtime.origin import key_path

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
LEAST_CHARACTERS = 32


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def checked(token: str, source: object) -> str:
    """Raises `RunFailed` for a token that could be guessed."""
    if len(token) < LEAST_CHARACTERS or not token.isascii():
        raise RunFailed(f"the token in {source} has {len(token)} characters, at least {LEAST_CHARACTERS} are expected")
    return token


@contextlib.contextmanager
def handed_over(token: str) -> Iterator[int]:
    """A descriptor from which one child process reads the token: pass it with `pass_fds`."""
    reader, writer = os.pipe()
    try:
        with open(writer, "w", encoding="ascii") as pipe:
            pipe.write(token)
        yield reader
    finally:
        os.close(reader)


def receive(descriptor: int) -> str:
    """Reads the token and closes the descriptor, so that no process started later inherits it."""
    with open(descriptor, encoding="ascii") as pipe:
        return checked(pipe.read().strip(), f"descriptor {descriptor}")


def place_digest(run_root: Path, run_id: str) -> str:
    """Names a run directory in this place: a copy of it has the same run id, but another digest."""
    return hashlib.sha256(os.fsencode(run_root) + run_id.encode()).hexdigest()[:16]


def token_file(run_root: Path, run_id: str) -> Path:
    """Where the token of a live run is for this user's commands."""
    return key_path().parent / "tokens" / f"{run_root.name}-{place_digest(run_root, run_id)}"


@contextlib.contextmanager
def kept_for_commands(token: str, run_root: Path, run_id: str) -> Iterator[None]:
    """The file exists meanwhile. Where it cannot be written the run works, but `doctor` cannot ask it."""
    path: Path | None = None
    try:
        path = token_file(run_root, run_id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a supervisor that was killed
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(token)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        log.warning("the token could not be kept for `penstock doctor`: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path is not None:
                path.unlink(missing_ok=True)


def kept(run_root: Path, run_id: str) -> str:
    """The token of a live run of this user. Raises `RunFailed` if there is none."""
    try:
        path = token_file(run_root, run_id)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            return checked(file.read().strip(), path)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunFailed(
            f"the token of {run_root} cannot be read ({error}): the run is not live, or was started by another user "
            "or with another home directory"
        ) from error
