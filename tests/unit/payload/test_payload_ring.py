"""The ring's bytes and its arena."""

from __future__ import annotations

import struct

import pytest

from penstock.errors import InvalidTransition, RemoteProtocolError
from penstock.payload.ring import HEADER_BYTES, Arena, Extent, Header, check_name

HEADER = Header("run-1", 12345, 8, 4096, 10, 11, 12)


def test_header_survives_the_round_trip() -> None:
    assert Header.unpack(HEADER.pack(), HEADER.layout.total_bytes) == HEADER
    plain = HEADER._replace(digests=False)
    assert Header.unpack(plain.pack(), plain.layout.total_bytes) == plain


def test_tables_do_not_overlap() -> None:
    layout = HEADER.layout
    assert HEADER_BYTES <= layout.readers < layout.words < layout.extents < layout.arena < layout.total_bytes
    assert layout.words % 8 == 0
    assert layout.arena % 4096 == 0
    assert layout.total_bytes - layout.arena == HEADER.capacity_bytes


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (0, b"X", "not a ring"),
        (8, struct.pack("<I", 99), "layout version 99"),
        (12, struct.pack("<I", 0x80), "flags"),
        (24, struct.pack("<I", 0), "0 slots"),
        (24, struct.pack("<I", 1 << 30), "slots"),
        (28, struct.pack("<I", 1), "1 readers"),
        (32, struct.pack("<Q", 1 << 60), "capacity"),
        (32, struct.pack("<Q", 8192), "truncated"),
        (64, b"\xff\xfe", "not text"),
    ],
)
def test_a_damaged_header_is_refused(offset: int, value: bytes, complaint: str) -> None:
    raw = bytearray(HEADER.pack())
    raw[offset : offset + len(value)] = value
    with pytest.raises(RemoteProtocolError, match=complaint):
        Header.unpack(bytes(raw), HEADER.layout.total_bytes)


def test_a_short_header_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="cut short"):
        Header.unpack(b"PENSTOCK", 8)


@pytest.mark.parametrize("run_id", ["", "x" * 65])
def test_a_run_id_must_fit(run_id: str) -> None:
    with pytest.raises(InvalidTransition, match="run id"):
        HEADER._replace(run_id=run_id).pack()


@pytest.mark.parametrize(
    "name",
    ["", "../etc/passwd", "penstock-", "penstock-" + "0" * 31, "penstock-" + "0" * 32 + "\n", "/penstock-" + "a" * 32],
)
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a ring name"):
        check_name(name)


def test_the_arena_prefers_low_addresses_and_joins_holes() -> None:
    arena = Arena(64 * 10)
    extents = [arena.allocate(size) for size in (1, 64, 65, 0)]
    assert extents == [Extent(0, 64), Extent(64, 64), Extent(128, 128), Extent(256, 64)]
    for extent in (extents[0], extents[2], extents[1]):
        assert extent is not None
        arena.free(extent)
        arena.check()
    assert arena.allocate(256) == Extent(0, 256)
    assert arena.allocate(64 * 6) is None
    assert arena.allocate(64 * 5) == Extent(320, 320)
    assert arena.used_bytes == arena.capacity_bytes
    arena.check()


@pytest.mark.parametrize("freed_before", [0, 1, 2])
def test_a_double_free_is_a_bug_that_shows(freed_before: int) -> None:
    arena = Arena(64 * 4)
    extents = [arena.allocate(64) for _ in range(4)]
    twice = extents[freed_before]
    assert twice is not None
    arena.free(twice)
    with pytest.raises(InvalidTransition, match="freed twice"):
        arena.free(twice)
    arena.check()
