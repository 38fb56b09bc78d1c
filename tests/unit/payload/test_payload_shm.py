"""Rings and readers in one process, on a file system of their own."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import LocalProtocolError, RemoteProtocolError, Stale, Transient
from penstock.payload.io import leftovers
from penstock.payload.io.leftovers import sweep, sweep_dead
from penstock.payload.io.mapping import Mapping
from penstock.payload.io.reader import RingReader
from penstock.payload.io.shm import Ring
from penstock.records.payload import PayloadRef


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring.create("run-1", capacity_bytes=64 * 1024, slots=4, directory=str(tmp_path))
    yield ring
    ring.check()
    ring.close()


@pytest.fixture
def reader(ring: Ring, tmp_path: Path) -> Iterator[RingReader]:
    reader = RingReader.attach(ring.name, directory=str(tmp_path), label="trainer")
    yield reader
    reader.close()


def replace(ref: PayloadRef, **changes) -> PayloadRef:
    return PayloadRef(**{name: getattr(ref, name) for name in ref.__struct_fields__} | changes)


def test_buffers_are_joined_and_read_without_a_copy(ring: Ring, reader: RingReader) -> None:
    ref = ring.write([b"ab", b"", memoryview(b"cdef")[1:]], timeout_s=0)
    lease = reader.take(ref)
    assert bytes(lease.view) == b"abdef"
    assert lease.view.readonly
    assert ring.statistics().reading == 1
    assert lease.consumed()
    assert ring.statistics().free == 4


def test_arrays_of_any_shape_are_buffers(ring: Ring, reader: RingReader) -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32), np.ones(3, np.uint8)]
    lease = reader.take(ring.write([array.data for array in arrays], timeout_s=0))
    assert bytes(lease.view) == b"".join(array.tobytes() for array in arrays)
    lease.consumed()


def test_large_bodies_take_the_piecewise_path(tmp_path: Path) -> None:
    ring = Ring.create("run-1", capacity_bytes=3 << 20, slots=2, directory=str(tmp_path))
    body = os.urandom(1_300_001)
    ref = ring.write([body[:300_000], body[300_000:]], timeout_s=0)
    reader = RingReader.attach(ring.address(host_id="h"), directory=str(tmp_path))
    assert reader.take(ref).view == body
    reader.close()
    ring.close()


def test_ready_counts_only_ready_slots(ring: Ring, reader: RingReader) -> None:
    refs = [ring.write([b"x"], timeout_s=0) for _ in range(3)]
    lease = reader.take(refs[0])
    assert ring.statistics()[:4] == (1, 0, 2, 1)
    assert lease.released()
    assert ring.statistics()[:4] == (1, 0, 3, 0)


def test_an_old_reference_never_gets_a_newer_payload(ring: Ring, reader: RingReader) -> None:
    old = ring.write([b"old"], timeout_s=0)
    reader.take(old).consumed()
    lap = [ring.write([b"new"], timeout_s=0) for _ in range(4)]
    assert old.slot in [ref.slot for ref in lap]
    with pytest.raises(Stale, match="is gone"):
        reader.take(old)
    assert [bytes(reader.take(ref).view) for ref in lap] == [b"new"] * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 1},
        {"slot": 99},
        {"slot": -1},
        {"generation": 2},
        {"size_bytes": 2},
        {"digest": 7},
        {"ring": "penstock-x"},
    ],
)
def test_a_reference_must_match_in_everything(ring: Ring, reader: RingReader, changes) -> None:
    ref = ring.write([b"x"], timeout_s=0)
    with pytest.raises(Stale):
        reader.take(replace(ref, **changes))
    assert reader.take(ref).consumed()


def test_a_reading_slot_blocks_no_write(ring: Ring, reader: RingReader) -> None:
    held = reader.take(ring.write([b"held"], timeout_s=0))
    for number in range(20):
        reader.take(ring.write([bytes([number])], timeout_s=0)).consumed()
    assert bytes(held.view) == b"held"
    assert held.consumed()


def test_a_full_ring_names_who_is_slow(ring: Ring, tmp_path: Path) -> None:
    refs = [ring.write([b"x"], timeout_s=0) for _ in range(4)]
    with pytest.raises(Transient, match="4 payloads are waiting and no consumer has attached"):
        ring.write([b"y"], timeout_s=0)
    reader = RingReader.attach(ring.name, directory=str(tmp_path), label="trainer-0")
    with pytest.raises(Transient, match=r"4 payloads are waiting to be fetched by trainer-0 \(pid"):
        ring.write([b"y"], timeout_s=0)
    leases = [reader.take(ref) for ref in refs]
    with pytest.raises(Transient, match=r"trainer-0 \(pid \d+\) holds 4 payloads"):
        ring.write([b"y"], timeout_s=0)
    leases[2].consumed()
    assert ring.write([b"y"], timeout_s=0).slot == refs[2].slot
    reader.close()


def test_room_is_measured_in_bytes_too(ring: Ring, reader: RingReader) -> None:
    big = ring.write([bytes(60 * 1024)], timeout_s=0)
    with pytest.raises(Transient, match="no room for 8192 bytes"):
        ring.write([bytes(8192)], timeout_s=0)
    reader.take(big).consumed()
    ring.write([bytes(8192)], timeout_s=0)


def test_a_body_that_can_never_fit_is_refused_at_once(ring: Ring) -> None:
    with pytest.raises(LocalProtocolError, match="can never fit"):
        ring.write([bytes(64 * 1024 + 1)], timeout_s=60)


class Half:
    """A body that does not finish what it began."""

    size_bytes = 10

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def fill(self, target: memoryview) -> Iterator[int]:
        target[:5] = b"half "
        yield 5
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("witness"), RuntimeError), (None, LocalProtocolError)], ids=["raises", "stops"]
)
def test_a_write_that_fails_costs_nothing(ring: Ring, error: Exception | None, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=r"witness|wrote only 5 of them"):
        ring.fill(Half(error), timeout_s=0)
    assert ring.statistics().free == 4
    assert len({ring.write([b"x"], timeout_s=0).slot for _ in range(4)}) == 4


def test_superseded_readers_are_counted_and_change_nothing(ring: Ring, reader: RingReader, tmp_path: Path) -> None:
    ref = ring.write([b"x"], timeout_s=0)
    second_reader = RingReader.attach(ring.name, directory=str(tmp_path))
    first = reader.take(ref)
    second = second_reader.take(ref)
    assert not first.consumed()
    assert ring.statistics().orphans == 1
    assert ring.statistics().reading == 1
    assert second.consumed()
    again = ring.write([b"y"], timeout_s=0)
    assert bytes(reader.take(again).view) == b"y"
    second_reader.close()


def test_a_lease_is_finalised_once(ring: Ring, reader: RingReader) -> None:
    lease = reader.take(ring.write([b"x"], timeout_s=0))
    lease.consumed()
    with pytest.raises(LocalProtocolError, match="already finalised"):
        lease.released()


def test_damaged_bytes_are_never_delivered(ring: Ring, reader: RingReader, tmp_path: Path) -> None:
    ref = ring.write([b"payload"], timeout_s=0)
    path = tmp_path / ring.name
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(b"payload")] ^= 1
    with path.open("r+b") as file:
        file.write(raw)
    with pytest.raises(Stale, match="corrupt"):
        reader.take(ref)
    with pytest.raises(Stale, match="is gone"):
        reader.take(ref)


def test_digests_can_be_switched_off(tmp_path: Path) -> None:
    ring = Ring.create("run-1", capacity_bytes=1024, slots=2, directory=str(tmp_path), digests=False)
    ref = ring.write([b"x"], timeout_s=0)
    assert ref.digest == 0
    reader = RingReader.attach(ring.name, directory=str(tmp_path))
    assert reader.take(ref).consumed()
    reader.close()
    ring.close()


def test_discard_frees_what_was_dropped(ring: Ring, reader: RingReader) -> None:
    refs = [ring.write([b"x"], timeout_s=0) for _ in range(4)]
    lease = reader.take(refs[0])
    foreign = [replace(refs[1], epoch=1), replace(refs[1], ring="another"), replace(refs[1], slot=99)]
    assert ring.discard([*foreign, *refs]) == 3
    assert ring.statistics()[:4] == (3, 0, 0, 1)
    assert lease.consumed()
    assert ring.discard(refs) == 0


def test_a_ring_outlives_its_writer(ring: Ring, tmp_path: Path) -> None:
    ref = ring.write([b"testament"], timeout_s=0)
    ring._mapping.close()  # as death would: locks gone, file left
    reader = RingReader.attach(ring.name, directory=str(tmp_path))
    assert not reader.writer_alive()
    assert bytes(reader.take(ref).view) == b"testament"
    reader.close()


def test_what_a_dead_reader_held_can_be_read_and_reclaimed(ring: Ring, tmp_path: Path) -> None:
    refs = [ring.write([b"x"], timeout_s=0) for _ in range(3)]
    dead = RingReader.attach(ring.name, directory=str(tmp_path))
    leases = [dead.take(ref) for ref in refs]
    dead._mapping.close()
    living = RingReader.attach(ring.name, directory=str(tmp_path))  # inherits the dead one's record, not its leases
    assert ring.statistics()[:4] == (1, 0, 3, 0)
    assert [living.take(ref).consumed() for ref in refs] == [True] * 3
    assert len(leases) == 3
    living.close()


def test_reclaim_spares_the_living(ring: Ring, reader: RingReader, tmp_path: Path) -> None:
    refs = [ring.write([b"x"], timeout_s=0) for _ in range(2)]
    other = RingReader.attach(ring.name, directory=str(tmp_path))
    mine = reader.take(refs[0])
    other.take(refs[1])
    other._mapping.close()
    assert ring.reclaim() == 1
    assert ring.statistics()[:4] == (2, 0, 1, 1)
    assert mine.consumed()


def test_a_closing_reader_gives_back(ring: Ring, tmp_path: Path) -> None:
    ref = ring.write([b"x"], timeout_s=0)
    reader = RingReader.attach(ring.name, directory=str(tmp_path))
    lease = reader.take(ref)
    reader.close()
    assert ring.statistics().ready == 1
    with pytest.raises(LocalProtocolError, match="was closed here"):
        lease.consumed()


def test_threads_of_one_producer_may_write_at_once(tmp_path: Path) -> None:
    ring = Ring.create("run-1", capacity_bytes=1 << 20, slots=256, directory=str(tmp_path))
    refs: list[tuple[bytes, PayloadRef]] = []

    def produce(letter: bytes) -> None:
        for size in range(50):
            body = letter * size
            refs.append((body, ring.write([body], timeout_s=0)))

    threads = [threading.Thread(target=produce, args=(bytes([65 + number]),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = RingReader.attach(ring.name, directory=str(tmp_path))
    assert len(refs) == 200
    for body, ref in refs:
        lease = reader.take(ref)
        assert lease.view == body
        assert lease.consumed()
    ring.check()
    reader.close()
    ring.close()


def test_the_file_is_private_and_its_name_unguessable(ring: Ring, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / ring.name).stat().st_mode) == 0o600
    other = Ring.create("run-1", capacity_bytes=64, slots=1, directory=str(tmp_path))
    assert other.name != ring.name
    assert other.epoch != ring.epoch
    other.close()


def test_attaching_refuses_what_is_not_a_ring_of_ours(ring: Ring, tmp_path: Path) -> None:
    def attach(name: str) -> None:
        RingReader.attach(name, directory=str(tmp_path))

    with pytest.raises(RemoteProtocolError, match="not a ring name"):
        attach("../" + ring.name)
    with pytest.raises(Stale, match="does not exist"):
        attach("penstock-" + "0" * 32)
    link = tmp_path / ("penstock-" + "1" * 32)
    link.symlink_to(tmp_path / ring.name)
    with pytest.raises(RemoteProtocolError, match="cannot be opened"):
        attach(link.name)
    (tmp_path / ring.name).chmod(0o644)
    with pytest.raises(RemoteProtocolError, match="not a private file"):
        attach(ring.name)
    (tmp_path / ring.name).chmod(0o600)
    with pytest.raises(Stale, match="epoch"):
        RingReader.attach(
            type(ring.address(host_id="h"))(ring.name, ring.epoch + 1, "h", "127.0.0.1"), directory=str(tmp_path)
        )


def test_sweep_removes_exactly_the_rings_of_the_run(ring: Ring, tmp_path: Path) -> None:
    other = Ring.create("run-2", capacity_bytes=64, slots=1, directory=str(tmp_path))
    (tmp_path / "unrelated").write_text("kept")
    assert sweep("run-2", str(tmp_path)) == [other.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ring.name, "unrelated"])
    other.close()


def test_only_rings_without_a_user_are_leftovers(tmp_path: Path) -> None:
    def left_by_dead_writer(guardian_pid: int, run_id: str = "run-1") -> Ring:
        ring = Ring.create(run_id, capacity_bytes=64, slots=1, directory=str(tmp_path), guardian_pid=guardian_pid)
        ring._mapping.close()
        return ring

    no_such_pid = 2**22 + 1
    guarded = left_by_dead_writer(os.getpid())
    dead = left_by_dead_writer(no_such_pid)
    adopted = left_by_dead_writer(1)
    resumed = left_by_dead_writer(no_such_pid, "run-3")
    being_read = left_by_dead_writer(no_such_pid)
    reader = RingReader.attach(being_read.name, directory=str(tmp_path))
    being_written = Ring.create("run-1", capacity_bytes=64, slots=1, directory=str(tmp_path), guardian_pid=no_such_pid)
    just_created = tmp_path / ("penstock-" + "a" * 32)
    just_created.touch(mode=0o600)
    damaged = tmp_path / ("penstock-" + "b" * 32)
    damaged.write_bytes(b"nonsense")
    os.utime(damaged, (0, 0))
    assert sorted(sweep_dead(str(tmp_path), keep_run="run-3")) == sorted([dead.name, adopted.name, damaged.name])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {guarded.name, resumed.name, being_read.name, being_written.name, just_created.name}
    reader.close()
    being_written.close()
    assert leftovers.UNREADABLE_GRACE_S > 0


def test_a_slot_locked_for_ever_is_an_error_and_not_a_hang(
    ring: Ring, reader: RingReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.payload.io.mapping.SLOT_LOCK_TIMEOUT_S", 0.01)
    ref = ring.write([b"x"], timeout_s=0)
    stopped = Mapping.open(ring.name, str(tmp_path))
    stopped.lock(ref.slot)
    with pytest.raises(Transient, match="has been locked for"):
        reader.take(ref)
    ring.write([b"y"], timeout_s=0)  # a writer needs no other lock
    stopped.unlock(ref.slot)
    assert reader.take(ref).consumed()
    stopped.close()


def test_leases_of_locked_slots_can_be_ended_later(
    ring: Ring, reader: RingReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.payload.io.mapping.SLOT_LOCK_TIMEOUT_S", 0.01)
    leases = [reader.take(ring.write([b"x"], timeout_s=0)) for _ in range(3)]
    stopped = Mapping.open(ring.name, str(tmp_path))
    stopped.lock(leases[1].ref.slot)
    with pytest.raises(Transient, match="has been locked for"):
        reader.finalise(leases, "consume")
    assert (ring.statistics().reading, reader.leases) == (3, 3)
    stopped.unlock(leases[1].ref.slot)
    assert reader.finalise(leases, "consume") == 0
    assert (ring.statistics().free, reader.leases) == (4, 0)
    stopped.close()


def test_a_full_file_system_is_a_full_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 0
    fallocate = os.posix_fallocate

    def refuse_beyond_room(fd: int, offset: int, length: int) -> None:
        if offset + length > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, offset, length)

    ring = Ring.create("run-1", capacity_bytes=64 << 20, slots=8, directory=str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", refuse_beyond_room)
    with pytest.raises(Transient, match="could not grow"):
        ring.write([bytes(1 << 20)], timeout_s=3600)  # no reader could make room, so it does not wait
    room = 20 << 20
    held = [ring.write([bytes([number]) * (8 << 20)], timeout_s=0) for number in range(2)]
    ring.write([bytes(2 << 20)], timeout_s=0)  # less than a step is left, and enough
    with pytest.raises(Transient, match=r"3 payloads are waiting and no consumer.*could not grow.*No space left"):
        ring.write([bytes(8 << 20)], timeout_s=0.01)
    ring.discard(held[:1])
    ring.write([bytes(8 << 20)], timeout_s=0)
    room = 64 << 20
    ring.write([bytes(8 << 20)], timeout_s=30)
    ring.check()
    ring.close()


def test_a_forked_child_does_not_keep_the_locks(ring: Ring, tmp_path: Path) -> None:
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_child)
        os.write(to_parent, b"!")
        os.read(from_parent, 1)  # lives until the parent lets go
        os._exit(0)
    os.read(from_child, 1)
    ring._mapping.close()
    observer = Mapping.open(ring.name, str(tmp_path))
    assert not observer.writer_alive()
    os.close(to_child)
    os.waitpid(child, 0)
    for fd in (from_child, to_parent, from_parent):
        os.close(fd)
    observer.close()
