"""One simulated engine and the task that keeps its weights up to date, around the real replica machine.

The engine's memory is the digest in each of a few buckets, so a mixture is a list of unequal digests, and anybody who
generates looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from penstock.errors import PeerLost, PenstockError, RemoteProtocolError, Stale, Transient
from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Held, Manifest
from penstock.runtime.backoff import Backoff
from penstock.sim.desk import AskWeights
from penstock.sim.engine import Body, Call, Engine, Signal, Sleep, Until
from penstock.sim.faults import FaultLog, WholeFaults
from penstock.weights import events as weights
from penstock.weights.replica import (
    AbandonReplica,
    Mismatched,
    Quiesced,
    Relabelled,
    Replica,
    ReplicaEffect,
    ReplicaEvent,
    ReportReplicaState,
    Resumed,
    ResumeEngine,
    Swapped,
    UpdateFailed,
    Verified,
    WriteBegan,
)
from penstock.wire import messages

Way = Literal["staged", "in_place"]

BUCKETS = 3
POLL_S = 10.0
CHANGE_S = 20.0
"""What one step of an update may take; an engine that takes longer hangs."""


class Artifacts:
    """The published versions on disk: the newest few, and the newest durable one."""

    KEPT = 2

    def __init__(self) -> None:
        self.ever: dict[str, set[Version]] = {}
        """Every digest that was ever published, and as which versions."""
        self._there: list[Held] = []
        self._durable = NOTHING_HELD
        self._damaged: set[Held] = set()

    def publish(self, manifest: Manifest, *, damaged: bool) -> None:
        """Writes a version, or writes it afresh."""
        held = manifest.held
        self.ever.setdefault(held.digest, set()).add(held.version)
        self._there = [*(there for there in self._there if there != held), held][-self.KEPT :]
        (self._damaged.add if damaged else self._damaged.discard)(held)

    def make_durable(self, held: Held) -> None:
        if held in self._there:
            self._durable = held

    def is_damaged(self, held: Held) -> bool:
        return held in self._damaged

    def bring(self, held: Held) -> str:
        """What is found in the files of a version."""
        if held not in self._there and held != self._durable:
            raise Stale(f"{held} was removed: newer versions exist")
        return f"damaged {held.digest}" if held in self._damaged else held.digest


class SimEngine:
    """The memory that serves, a second one if updates are staged, and whether decoding goes on."""

    def __init__(self) -> None:
        self.memory = [""] * BUCKETS
        self.staged = [""] * BUCKETS
        self.asleep = False
        self.awoken = Signal()
        self.version = Version(-1)
        self.digest = ""
        """What it believes to serve."""

    @property
    def mixed(self) -> bool:
        return len(set(self.memory)) > 1


class SimUpdater:
    """The one task of a worker that changes its engine's weights, step by step as the real one."""

    def __init__(
        self,
        sim: Engine,
        member: MemberId,
        engine: SimEngine,
        artifacts: Artifacts,
        faults: FaultLog,
        settings: WholeFaults,
        *,
        way: Way,
        bring_s: float,
        give_up: Callable[[str], None],
        is_awake: Callable[[], bool],
        woken: Signal,
    ) -> None:
        """`give_up` ends this process; weights are only asked for while the pool lets the engine be awake."""
        self.replica = Replica()
        self.updates = 0
        self.updating = False
        self._sim = sim
        self._member = member
        self._engine = engine
        self._artifacts = artifacts
        self._faults = faults
        self._settings = settings
        self._way: Way = way
        self._bring_s = bring_s
        self._give_up = give_up
        self._is_awake = is_awake
        self._woken = woken
        self._backoff = Backoff(0.5, 5.0)
        self._step = "poll"
        self._wedged = self._given_up = False

    def run(self) -> Body:
        try:
            self._engine.asleep = True  # it holds nothing that it could serve
            yield from self._perform([ReportReplicaState(self.replica.state, self.replica.version, "")])
            while True:
                yield from self._once()
        except PenstockError as error:
            self._give_up(error.message)

    def _once(self) -> Body:
        """One poll and at most one update."""
        self.updating = False
        while not self._is_awake():
            yield Until(self._woken)
        manifest = yield Call(AskWeights(self.replica.held, self._member), POLL_S)
        if isinstance(manifest, messages.Refused):
            raise PeerLost(manifest.message)
        if manifest is None or manifest.held == self.replica.held or not self._is_awake():
            return
        self.updating = True
        try:
            if self.replica.may_serve and manifest.digest == self.replica.digest:
                self._engine.version = manifest.version
                yield from self._perform(self._tell(Relabelled(manifest.version)))
            else:
                yield from (self._staged if self._way == "staged" else self._in_place)(manifest)
        except Stale:
            self._faults.count("version gone before it was read")
            yield from self._rest()
        except PenstockError as error:
            if self._given_up:
                raise
            yield from self._failed(error)
        else:
            self._backoff.reset()
            self.updates += 1
        self.updating = False

    def _rest(self) -> Body:
        self.updating = False
        yield Sleep(self._backoff.next_s())

    def _staged(self, manifest: Manifest) -> Body:
        engine = self._engine
        found = yield from self._bring(manifest)
        yield from self._do("stage", 0.1)
        engine.staged = [found] * BUCKETS
        self._perhaps_damage(engine.staged)
        yield from self._do("prove", 0.02)
        if engine.staged != [manifest.digest] * BUCKETS:
            raise RemoteProtocolError(f"what was staged is not version {manifest.version}")
        if not self.replica.may_serve:
            yield from self._do("quiesce", 0.02)
            engine.asleep = True
            self._tell(Quiesced())
        yield from self._do("swap", 0.01)
        engine.memory = list(engine.staged)
        engine.version, engine.digest = manifest.version, manifest.digest
        if self.replica.may_serve:
            yield from self._perform(self._tell(Swapped(manifest.version, manifest.digest)))
        else:
            self._tell(Verified(manifest.version, manifest.digest))
            yield from self._perform([ResumeEngine()])

    def _in_place(self, manifest: Manifest) -> Body:
        engine = self._engine
        found = yield from self._bring(manifest)
        if found != manifest.digest:
            raise RemoteProtocolError(f"the files of version {manifest.version} are damaged")
        yield from self._do("quiesce", 0.02)
        engine.asleep = True
        self._tell(Quiesced())
        self._tell(WriteBegan())
        for bucket in range(BUCKETS):
            yield from self._do("write", 0.05)
            if self._strikes("write failed", self._settings.write_fails):
                raise RemoteProtocolError(f"bucket {bucket} could not be written")
            engine.memory[bucket] = found
        self._perhaps_damage(engine.memory)
        engine.version, engine.digest = manifest.version, manifest.digest
        yield from self._do("prove", 0.02)
        if engine.memory != [manifest.digest] * BUCKETS:
            yield from self._fence(manifest.digest)
            raise RemoteProtocolError(f"the engine does not hold version {manifest.version}")
        self._tell(Verified(manifest.version, manifest.digest))
        yield from self._perform([ResumeEngine()])

    def _bring(self, manifest: Manifest) -> Body:
        slow = self._strikes("weights transfer slow", self._settings.slow_bring)
        yield from self._do("bring", self._bring_s * (30.0 if slow else 1.0))
        if self._strikes("weights transfer broke off", self._settings.bring_fails):
            raise Transient("the transfer broke off")
        return self._artifacts.bring(manifest.held)

    def _perhaps_damage(self, memory: list[str]) -> None:
        if self._strikes("digest mismatch", self._settings.damage_memory):
            memory[-1] = f"damaged {memory[-1]}"

    def _fence(self, expected: str) -> Body:
        self._tell(Mismatched(expected, "another"))
        yield from self._do("fence", 0.02)
        self._engine.asleep = True

    def _failed(self, error: PenstockError) -> Body:
        step = self._step
        if self.replica.may_serve and step != "bring" and not self._wedged:
            yield from self._do("recheck", 0.02)
            if self._engine.memory != [self.replica.digest] * BUCKETS:
                yield from self._fence(self.replica.digest)
        failed = UpdateFailed(step, error.message, isinstance(error, Transient))
        yield from self._perform(self._tell(failed))
        if self._wedged:
            raise error
        yield from self._rest()

    def _do(self, step: str, seconds: float) -> Body:
        """One step of an update; one that does not end costs the process."""
        self._step = step
        if step != "bring" and self._strikes("engine hung", self._settings.engine_hangs):
            yield Sleep(CHANGE_S)
            self._wedged = True
            raise PeerLost(f"step {step!r} of a weight update did not end")
        yield Sleep(seconds)

    def _perform(self, decided: list[ReplicaEffect]) -> Body:
        """Carries out effects in order; resuming may add more."""
        pending = list(decided)
        while pending:
            match pending.pop(0):
                case ResumeEngine():
                    try:
                        yield from self._do("resume", 0.01)
                        if self._strikes("resume failed", self._settings.resume_fails):
                            raise RemoteProtocolError("the engine refused to go on")
                    except PenstockError as error:
                        pending = [*self._tell(UpdateFailed("resume", error.message)), *pending]
                    else:
                        self._engine.asleep = False
                        pending = [*self._tell(Resumed()), *pending]
                        self._sim.fire(self._engine.awoken)
                case ReportReplicaState(state, version, digest, error):
                    self._step = "report"
                    report = weights.ReplicaReported(self._member, state, version, digest, error=error)
                    answer = yield Call(report)
                    if isinstance(answer, messages.Refused):
                        self._given_up = True
                        raise PeerLost(answer.message)
                case AbandonReplica(reason):
                    self._given_up = True
                    raise PeerLost(f"this replica gives up: {reason}")

    def _tell(self, event: ReplicaEvent) -> list[ReplicaEffect]:
        decided = self.replica.handle(event, self._sim.now)
        self.replica.check()
        return decided

    def _strikes(self, what: str, probability: float) -> bool:
        return self._faults.strikes(what, probability, self._sim.now)
