"""Slots and ring against a model, in which producer and readers die before and after every store they make."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import Stale, Transient
from penstock.payload.io.leftovers import sweep
from penstock.payload.io.mapping import Mapping
from penstock.payload.io.reader import Lease, RingReader
from penstock.payload.io.shm import Ring
from penstock.records.payload import PayloadRef
from profiles import examples

SLOTS, CAPACITY_BYTES, READERS = 5, 4096, 3


class Died(BaseException):
    """What a killed process would never see. After it, nothing that process does has any effect."""


def doom(mapping: Mapping, after_stores: int, torn: bool) -> None:
    """Let the process that uses `mapping` die at its next store but `after_stores`: before it, or (`torn`) after it."""
    left = after_stores

    def fatal(method: str) -> Any:
        real = getattr(Mapping, method)

        def store(*args: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1 and torn:
                real(mapping, *args)
            if left < 0:
                raise Died
            real(mapping, *args)

        return store

    for method in ("store", "store_extent", "count_orphan"):
        setattr(mapping, method, fatal(method))


class SlotsAndRing(RuleBasedStateMachine):
    refs = Bundle("refs")

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.random = random.Random(0)
        self.bodies: dict[PayloadRef, bytes] = {}
        self.gone: set[PayloadRef] = set()
        self.unsure: set[PayloadRef] = set()
        """Their reader died while saying "consumed": the word may or may not have been stored."""
        self.leases: list[dict[PayloadRef, Lease]] = [{} for _ in range(READERS)]
        self.owner: dict[PayloadRef, int] = {}
        self.deaths = 0
        self.rings: list[Ring] = []
        self.new_ring()
        self.readers: list[dict[str, RingReader]] = [{} for _ in range(READERS)]

    def new_ring(self) -> None:
        self.ring = Ring.create("run", capacity_bytes=CAPACITY_BYTES, slots=SLOTS, directory=self.directory.name)
        self.rings.append(self.ring)

    def reader(self, who: int, ring: str) -> RingReader:
        readers = self.readers[who]
        if ring not in readers:
            readers[ring] = RingReader.attach(ring, directory=self.directory.name, label=f"reader-{who}")
        return readers[ring]

    def lives(self, ref: PayloadRef) -> bool:
        return ref in self.bodies and ref not in self.gone

    def kill_reader(self, who: int) -> None:
        self.deaths += 1
        for reader in self.readers[who].values():
            reader._mapping.close()  # the kernel does as much
        self.readers[who].clear()
        self.leases[who].clear()
        self.owner = {ref: owner for ref, owner in self.owner.items() if owner != who}

    def room_for(self, size: int) -> bool:
        statistics = self.ring.statistics()
        return statistics.free > 0 and size <= CAPACITY_BYTES - statistics.used_bytes

    @rule(target=refs, size=st.sampled_from([0, 1, 64, 300, 1500]))
    def write(self, size: int) -> PayloadRef | None:
        body = self.random.randbytes(size)
        room = self.room_for(size)
        try:
            ref = self.ring.write([body[: size // 2], body[size // 2 :]], timeout_s=0)
        except Transient:
            assert not room or size > 64  # a hole large enough may be missing, a slot and 64 bytes may not
            return None
        assert ref not in self.bodies
        self.bodies[ref] = body
        return ref

    @precondition(lambda self: len(self.rings) < 4)
    @rule(after=st.integers(0, 2), torn=st.booleans(), size=st.sampled_from([1, 300]))
    def producer_dies_writing(self, after: int, torn: bool, size: int) -> None:
        doom(self.ring._mapping, after, torn)
        with pytest.raises((Died, Transient)):  # noqa: PT012  begin, extent and commit are the three stores
            for _ in range(SLOTS + 1):
                self.ring.write([bytes(size)], timeout_s=0)
                raise AssertionError("survived its own death")
        self.deaths += 1
        self.ring._mapping.close()
        self.new_ring()

    @rule(ref=refs, who=st.integers(0, READERS - 1))
    def take(self, ref: PayloadRef | None, who: int) -> None:
        if ref is None:
            return
        try:
            lease = self.reader(who, ref.ring).take(ref)
        except Stale:
            assert not self.lives(ref) or ref in self.unsure
            self.settle(ref, gone=True)
            return
        assert self.lives(ref)
        assert lease.view == self.bodies[ref]
        self.settle(ref, gone=False)
        self.leases[who][ref] = lease
        self.owner[ref] = who

    def settle(self, ref: PayloadRef, gone: bool) -> None:
        self.unsure.discard(ref)
        if gone:
            self.gone.add(ref)

    @rule(who=st.integers(0, READERS - 1), data=st.data(), consume=st.booleans())
    def finalise(self, who: int, data: st.DataObject, consume: bool) -> None:
        if not self.leases[who]:
            return
        ref = data.draw(st.sampled_from(sorted(self.leases[who], key=lambda ref: (ref.ring, ref.slot, ref.generation))))
        lease = self.leases[who].pop(ref)
        owned = self.owner.get(ref) == who
        if owned:
            assert lease.view == self.bodies[ref]  # nothing may have touched what an owner reads
            del self.owner[ref]
        assert (lease.consumed() if consume else lease.released()) == owned
        if owned and consume:
            self.gone.add(ref)

    @rule(who=st.integers(0, READERS - 1), ref=refs)
    def consume_a_copy(self, who: int, ref: PayloadRef | None) -> None:
        """Sent by a reader of a copy, perhaps twice, perhaps while another still reads."""
        if ref is None:
            return
        freed = self.reader(who, ref.ring).consume([ref, ref])
        if freed:
            assert freed == 1
            assert self.lives(ref)
        else:
            assert not self.lives(ref) or ref in self.unsure
        self.owner.pop(ref, None)
        self.settle(ref, gone=True)

    @rule(who=st.integers(0, READERS - 1), data=st.data(), consume=st.booleans())
    def finalise_together(self, who: int, data: st.DataObject, consume: bool) -> None:
        leases = self.leases[who]
        ring = data.draw(st.sampled_from(sorted({ref.ring for ref in leases}))) if leases else None
        batch = [leases.pop(ref) for ref in list(leases) if ref.ring == ring]
        owned = [lease.ref for lease in batch if self.owner.get(lease.ref) == who]
        if ring is None:
            return
        assert self.reader(who, ring).finalise(batch, "consume" if consume else "release") == len(batch) - len(owned)
        for ref in owned:
            del self.owner[ref]
            if consume:
                self.gone.add(ref)

    @rule(who=st.integers(0, READERS - 1), ref=refs, after=st.integers(0, 1), torn=st.booleans())
    def reader_dies_taking(self, who: int, ref: PayloadRef | None, after: int, torn: bool) -> None:
        if ref is None or not self.lives(ref) or ref in self.unsure:
            return
        reader = self.reader(who, ref.ring)
        doom(reader._mapping, after, torn)
        try:
            lease = reader.take(ref)
            lease.consumed()
        except Died:
            pass
        if after == 1:
            self.unsure.add(ref)
        if after == 1 or torn:
            self.owner.pop(ref, None)  # the take was stored: the reader before is superseded
        self.kill_reader(who)

    @rule(who=st.integers(0, READERS - 1))
    def reader_dies(self, who: int) -> None:
        self.kill_reader(who)

    @rule(who=st.integers(0, READERS - 1))
    def reader_leaves(self, who: int) -> None:
        for reader in self.readers[who].values():
            reader.close()
        self.kill_reader(who)

    @rule(ref=refs)
    def discard(self, ref: PayloadRef | None) -> None:
        if ref is None or ref.ring != self.ring.name:
            return
        count = self.ring.discard([ref])
        if count:
            assert self.lives(ref)
            assert ref not in self.owner
            self.settle(ref, gone=True)
        else:
            assert not self.lives(ref) or ref in self.owner or ref in self.unsure
            if ref not in self.owner and ref in self.unsure:
                self.settle(ref, gone=True)

    @rule()
    def reclaim(self) -> None:
        self.ring.reclaim()
        statistics = self.ring.statistics()
        held = sum(ref.ring == self.ring.name for ref in self.owner)
        assert statistics.reading == held
        assert statistics.writing == 0

    @invariant()
    def books_agree(self) -> None:
        self.ring.check()
        statistics = self.ring.statistics()
        here = [ref for ref in self.bodies if ref.ring == self.ring.name and ref not in self.gone]
        unsure = sum(ref in self.unsure for ref in here)
        assert len(here) - unsure <= statistics.ready + statistics.reading <= len(here)

    def teardown(self) -> None:
        for who in range(READERS):
            self.kill_reader(who)
        for ref in self.bodies:  # nothing lost, nothing doubled, nothing corrupt: across all rings ever made
            self.take(ref, 0)
            if ref in self.leases[0]:
                assert self.leases[0].pop(ref).consumed()
                self.gone.add(ref)
        assert self.gone == set(self.bodies)
        self.kill_reader(0)
        assert len(sweep("run", self.directory.name)) == len(self.rings)
        for ring in self.rings:
            ring.close()
        self.directory.cleanup()


TestSlotsAndRing = SlotsAndRing.TestCase
TestSlotsAndRing.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
