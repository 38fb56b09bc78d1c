"""Marks run directories that this user made, so that commands may run the code that they name without asking.

`RUN/origin.json` holds two codes made with a secret key of the user, which no one else can compute:

- `place`, over the directory itself. It holds while the directory is on its file system, whatever is edited in it.
- `config`, over the configuration. It holds for a copy, whose configuration must then be unchanged.

The key is in `$XDG_STATE_HOME/penstock`, by default `~/.local/state/penstock`. Without it a run counts as foreign.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path

from penstock.runtime.beneath import read_beneath, write_beneath

MARK = "origin.json"
KEY_BYTES = 32


def mark(root: Path, run_id: str) -> None:
    """Marks the run as made by this user. Does nothing where the user can keep no key."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        key = _read_key() or _make_key()
        if key is not None:
            codes = {"place": _place(key, root, run_id), "config": _config(key, root, run_id)}
            write_beneath(root, root / MARK, json.dumps(codes).encode())


def is_marked(root: Path, run_id: str) -> bool:
    """Whether this user made the run: in this place, or it is a copy with the same configuration."""
    try:
        key = _read_key()
        codes = json.loads(read_beneath(root, root / MARK))
        if key is None or not isinstance(codes, dict):
            return False
        if _equal(_place(key, root, run_id), codes.get("place")):
            return True
        return root.stat().st_uid == os.geteuid() and _equal(_config(key, root, run_id), codes.get("config"))
    except (OSError, ValueError):
        return False


def _place(key: bytes, root: Path, run_id: str) -> str:
    """Of the directory and of its `run.json`, which is never replaced: a number alone could be used again."""
    found = (os.stat(root), os.stat(root / "run.json", follow_symlinks=False))
    return _code(key, "place", run_id, *(f"{one.st_dev} {one.st_ino} {one.st_uid}" for one in found))


def _config(key: bytes, root: Path, run_id: str) -> str:
    return _code(key, "config", run_id, hashlib.sha256(read_beneath(root, root / "config.toml")).hexdigest())


def _code(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def _equal(expected: str, found: object) -> bool:
    return isinstance(found, str) and found.isascii() and hmac.compare_digest(expected, found)


def key_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()) / "penstock" / "origin.key"


def _read_key() -> bytes | None:
    """None if there is no key, or others could have read or written it."""
    try:
        with open(os.open(key_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            owner = os.fstat(file.fileno())
            key = file.read(KEY_BYTES + 1)
    except (OSError, RuntimeError):
        return None
    private = owner.st_uid == os.geteuid() and not stat.S_IMODE(owner.st_mode) & 0o077
    return key if private and len(key) == KEY_BYTES else None


def _make_key() -> bytes | None:
    """Makes the key of this user. Of several processes that do so at once, all get the key of the first."""
    path = key_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read_key()
