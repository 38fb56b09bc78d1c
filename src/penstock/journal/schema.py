"""The file: three tables, their version, and an error message for each way in which it can be unreadable.

    meta       schema version, run id
    blocks     events in order; one row per group commit, later joined and compressed by compaction
    snapshots  the state of every machine after some event: replay starts there

Each event keeps its number (`seq`, from 1, without gaps) in any block. Every row has a checksum over all its columns: a
flipped bit is detected before the row is used.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import ConfigError, PenstockError, RunFailed
from penstock.records.ids import PipelineName, RunId
from penstock.wire.codec import DAMAGED

SCHEMA_VERSION = 8

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE blocks (
    first_seq INTEGER PRIMARY KEY, last_seq INTEGER NOT NULL, packed INTEGER NOT NULL, checksum INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX unpacked_blocks ON blocks (last_seq) WHERE packed = 0;
CREATE TABLE snapshots (
    seq INTEGER NOT NULL, pipeline TEXT NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (seq, pipeline)
) WITHOUT ROWID;
"""


WHAT_TO_DO = (
    "The run cannot be resumed without it: restore the file from a copy, or start a new run that continues from the "
    "newest weights, with model.kind = 'path' and model.path = a directory below {}/checkpoints"
)

Row = tuple[int, int, int, int, bytes]
"""A row of `blocks`."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One journalled event."""

    seq: int
    pipeline: PipelineName
    at: float
    body: bytes
    """The event as msgpack, with its tag."""
    decided: bytes = b""
    """The decisions that followed, as msgpack, as far as a story needs them."""


_encode_entries = msgspec.msgpack.Encoder().encode
MOST_EVENTS = 1 << 20
MOST_BYTES = 1 << 30
"""Bounds of one block, far above those of the writer: a small file must not fill the memory of its reader."""

_decode_entries = msgspec.msgpack.Decoder(Annotated[list[Entry], msgspec.Meta(max_length=MOST_EVENTS)]).decode


def checksum(body: bytes, *columns: object) -> int:
    """Over the body of a row and its other columns."""
    return zlib.crc32(body, zlib.crc32(repr(columns).encode()))


def pack(entries: Sequence[Entry], *, compress: bool) -> Row:
    body = _encode_entries(list(entries))
    first, last, packed = entries[0].seq, entries[-1].seq, int(compress)
    body = zlib.compress(body, 6) if compress else body
    return first, last, packed, checksum(body, first, last, packed), body


def unpack(path: Path, row: Row) -> list[Entry]:
    first, last, packed, expected, body = row
    if not isinstance(body, bytes) or checksum(body, first, last, packed) != expected:
        raise damaged(path, f"events {first} to {last}", "their checksum does not match")
    try:
        return _decode_entries(_decompressed(body) if packed else body)
    except (zlib.error, *DAMAGED) as error:
        raise damaged(path, f"events {first} to {last}", str(error)) from error


def _decompressed(body: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    text = decompressor.decompress(body, MOST_BYTES)
    if not decompressor.eof:
        raise zlib.error(f"it is cut short, or has more than {MOST_BYTES} bytes")
    return text


def check_snapshot(path: Path, seq: int, pipeline: str, expected: int, body: bytes) -> None:
    if not isinstance(body, bytes) or checksum(body, seq, pipeline) != expected:
        raise damaged(path, f"the state of {pipeline} after event {seq}", "its checksum does not match")


def damaged(path: Path, what: str, why: str) -> RunFailed:
    """The record of trained samples is lost; the trained weights are in the checkpoints."""
    return RunFailed(f"journal {path} is damaged: {what} cannot be trusted ({why}). {WHAT_TO_DO.format(path.parent)}")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns errors of the database into sentences with the cause and the remedy."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite may quote damaged bytes in its message
        raise explain(path, error) from error


def explain(path: Path, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return RunFailed(
            f"journal {path}: the disk is full; everything acknowledged so far is safe. Free some space, then resume "
            "the run"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or isinstance(error, UnicodeDecodeError):
        return RunFailed(f"journal {path} is damaged ({error}). {WHAT_TO_DO.format(path.parent)}")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return RunFailed(f"journal {path} cannot be read or written ({error}): check the disk and the permissions")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RunFailed(f"journal {path} is locked by another process ({error}): end it and try again")
    return RunFailed(f"journal {path} failed: {type(error).__name__}: {error}")


def create(connection: sqlite3.Connection, run_id: RunId) -> None:
    """Creates the tables of a new journal in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES.split(";"):
        connection.execute(statement)
    meta = [("schema_version", str(SCHEMA_VERSION)), ("run_id", run_id)]
    meta.append(("checksum", _meta_checksum(dict(meta))))
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
    connection.execute("COMMIT")


def exists(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is not None


def verify(connection: sqlite3.Connection, path: Path, run_id: RunId | None = None) -> None:
    """Raises if the file is of another version, of another run, or not a journal."""
    if not exists(connection):
        raise RunFailed(f"{path} is not a journal of Penstock: it has no meta table")
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    version = meta.get("schema_version")
    expected = meta.get("checksum")
    if expected is not None and expected != _meta_checksum(meta):
        raise damaged(path, "its version and run id", "their checksum does not match")
    if version != str(SCHEMA_VERSION):
        age = "an older" if version in [str(older) for older in range(SCHEMA_VERSION)] else "another"
        raise ConfigError(
            f"journal {path} was written by {age} version of Penstock: it has journal version {version}, this one "
            f"reads {SCHEMA_VERSION}. Use the version that made the run, or start a new run"
        )
    found = meta.get("run_id")
    if run_id is not None and found != run_id:
        raise ConfigError(f"journal {path} belongs to run {found}, not to run {run_id}: do not mix run directories")


def _meta_checksum(meta: Mapping[str, str]) -> str:
    return str(checksum(b"", meta.get("schema_version"), meta.get("run_id")))


def open_to_read(path: Path) -> sqlite3.Connection:
    """A read-only connection; works beside a live writer, and in a directory that is not writable. Follows no link."""
    for one in (path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm", "-journal"))):
        if one.is_symlink():
            raise RunFailed(f"{one} is a link: links are not followed in a run directory")
    if not path.is_file():
        raise RunFailed(f"there is no journal at {path}")
    with explained(path):
        uri = path.resolve().as_uri()
        connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # Write-ahead mode needs a shared-memory file beside the journal, which a read-only disk cannot have.
            connection.close()
            connection = sqlite3.connect(f"{uri}?immutable=1", uri=True, isolation_level=None, check_same_thread=False)
        try:
            verify(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection
