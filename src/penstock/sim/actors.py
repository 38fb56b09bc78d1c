"""The simulated rollout workers and the trainer, written as the real ones run: ask, work, report, repeat."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from penstock.records.batch import Batch
from penstock.records.ids import MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import NOTHING_HELD, Held, Manifest
from penstock.sim.desk import AskWeights
from penstock.sim.engine import Body, Call, Engine, Owner, Signal, Sleep, Until
from penstock.sim.faults import FaultLog
from penstock.sim.scoring import scores
from penstock.wire import messages

LONG_POLL_S = 20.0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take, in virtual seconds. Generation times are lognormal with this mean and spread."""

    generate_s: float = 4.0
    generate_spread: float = 0.4
    score_s: float = 0.4
    step_s: float = 1.0
    publish_s: float = 0.1
    load_s: float = 0.2
    checkpoint_s: float = 0.3
    heartbeat_s: float = 4.0
    wake_s: float = 1.0
    sleep_s: float = 0.3
    backoff_s: float = 0.05


class SimWorker:
    """One incarnation of a rollout worker: leases, generates several groups at once, swaps weights in between."""

    def __init__(
        self, engine: Engine, name: str, random: Random, faults: FaultLog, pace: Pace, *, concurrency: int, slow: float
    ) -> None:
        self.owner = Owner(name)
        self.member = MemberId(name)
        self.engine = engine
        self.random = random
        self.faults = faults
        self.pace = pace
        self.slow = slow
        self.free = concurrency
        self.busy_s = 0.0
        self.retired = False
        """Told that nothing will ever be issued again."""
        self.muted = False
        self.weights: Manifest | None = None
        self._digest = ""
        self._freed = Signal()
        self._loaded = Signal()
        engine.spawn(self.owner, self._main())

    def _main(self) -> Body:
        answer = yield Call(messages.Register(self.owner.pipeline, self.member, "rollout"))
        if not isinstance(answer, messages.Registered):
            self.owner.alive = False
            return
        self.engine.after(0.0, self._beat)
        self.engine.spawn(self.owner, self._follow_weights())
        if self.weights is None:
            yield Until(self._loaded)
        request, backoff_s = 0, self.pace.backoff_s
        while True:
            if self.free == 0:
                yield Until(self._freed)
                continue
            version = self.weights.version if self.weights is not None else Version(0)
            answer = yield Call(
                messages.AskLease(self.owner.pipeline, self.member, request, self.free, version), LONG_POLL_S
            )
            if isinstance(answer, messages.Leased) and answer.leases:
                request += 1
                backoff_s = self.pace.backoff_s
                for lease in answer.leases:
                    self.free -= len(lease.samples)
                    self.engine.spawn(self.owner, self._generate(lease))
            elif isinstance(answer, messages.Leased) and answer.verdict == "exhausted":
                self.retired = True
                return
            elif isinstance(answer, messages.Leased):
                yield Sleep(backoff_s)
                backoff_s = min(1.0, 2 * backoff_s)
            else:
                self.owner.alive = False
                return

    def _generate(self, lease: PromptLease) -> Body:
        weights, digest = self.weights, self._digest
        faults, now = self.faults, self.engine.now
        spread = self.pace.generate_spread
        length = self.pace.generate_s * self.slow * self.random.lognormvariate(-spread * spread / 2, spread)
        yield Sleep(length)
        self.busy_s += length * len(lease.samples)
        version = weights.version if weights is not None else Version(0)
        rollouts: list[Rollout] = []
        failures: list[FailedRollout] = []
        evaluated: list[SampleId] = []
        for sample in lease.samples:
            if faults.faults.poisoned(lease.prompt):
                failures.append(FailedRollout(sample, "prepare", "poisoned prompt"))
            elif faults.strikes("sample failed", faults.faults.sample_fails, now):
                failures.append(FailedRollout(sample, "generate", "simulated failure"))
            elif lease.evaluation is not None:
                evaluated.append(sample)
            else:
                rollouts.append(self._rollout(sample, version, digest))
        now_served = self.weights.version if self.weights is not None else Version(0)
        counted = scores(lease, evaluated, [(version, digest), (now_served, self._digest)]) if evaluated else ()
        answer = yield Call(
            messages.Deliver(self.owner.pipeline, self.member, tuple(rollouts), tuple(failures), scores=tuple(counted))
        )
        if isinstance(answer, messages.Refused):
            self.owner.alive = False
            return
        self.free += len(lease.samples)
        self.engine.fire(self._freed)

    def _rollout(self, sample: SampleId, version: Version, digest: str) -> Rollout:
        payload = PayloadRef(self.member, 0, sample, 0, 1, sample)
        return Rollout(sample, version, digest, self.random.random(), 1, payload)

    def _follow_weights(self) -> Body:
        while True:
            held = Held(self.weights.version, self._digest) if self.weights is not None else NOTHING_HELD
            manifest: Manifest | None = yield Call(AskWeights(held, self.member), LONG_POLL_S)
            if manifest is None:
                continue
            yield Sleep(self.pace.load_s)
            faults = self.faults
            torn = faults.strikes("wrong weights", faults.faults.wrong_weights, self.engine.now)
            self.weights, self._digest = manifest, "torn" if torn else manifest.digest
            self.engine.fire(self._loaded)

    def _beat(self) -> None:
        """The sidecar: a strand of its own, that works on while its parent is wedged."""
        if self.owner.alive and not self.muted:
            ago_s = self.engine.now - self.owner.progressed_at if self.owner.wedged else 0.0
            send_beat(self.engine, self.owner, self.member, ago_s)
            self.engine.after(self.pace.heartbeat_s, self._beat)


class Lineage:
    """What is on the trainer's disk and survives it: two checkpoints, as the lists of prompts their weights saw."""

    KEPT = 2

    def __init__(self) -> None:
        self.checkpoints: list[list[list[PromptIndex]]] = [[]]
        """Oldest first; the prompts of every step."""

    @property
    def prompts(self) -> list[list[PromptIndex]]:
        return self.checkpoints[-1]

    @property
    def step(self) -> StepIndex:
        return StepIndex(len(self.prompts))

    @property
    def last_resort(self) -> StepIndex:
        return StepIndex(len(self.checkpoints[0]))

    def save(self, prompts: list[list[PromptIndex]]) -> None:
        self.checkpoints = [*self.checkpoints, list(prompts)][-self.KEPT :]

    def damage(self) -> bool:
        """The newest checkpoint cannot be read any more. False if there is no other."""
        if len(self.checkpoints) < self.KEPT or self.step == self.last_resort:
            return False
        self.checkpoints.pop()
        return True


class SimTrainer:
    """One incarnation of the trainer, started from the checkpoint in `lineage`."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        lineage: Lineage,
        faults: FaultLog,
        pace: Pace,
        *,
        checkpoint_every: int,
        living: Callable[[str], bool],
    ) -> None:
        self.owner = Owner(name)
        self.member = MemberId(name)
        self.engine = engine
        self.lineage = lineage
        self.faults = faults
        self.pace = pace
        self.checkpoint_every = checkpoint_every
        self.living = living
        self.busy_s = 0.0
        self.done = False
        self.seen: list[list[PromptIndex]] = list(lineage.prompts)
        engine.spawn(self.owner, self._main(lineage.step))

    def _main(self, step: StepIndex) -> Body:
        answer = yield Call(
            messages.Register(self.owner.pipeline, self.member, "trainer", step=step, lineage=self.owner.name)
        )
        if not isinstance(answer, messages.Registered):
            self.owner.alive = False
            return
        self.engine.after(0.0, self._beat)
        yield from self._publish(Version(step))
        while True:
            answer = yield Call(messages.AskBatch(self.owner.pipeline, self.member, step), LONG_POLL_S)
            if isinstance(answer, messages.Complete):
                break
            if isinstance(answer, messages.Refused):
                self.owner.alive = False
                return
            if isinstance(answer, messages.NotYet):
                continue
            missing = self._fetch(answer.batch)
            yield Sleep(self.pace.step_s)
            self.busy_s += self.pace.step_s
            self.seen.append([group.prompt for group in answer.batch.groups if group.prompt not in missing])
            yield from self._publish(Version(step + 1))
            answer = yield Call(
                messages.AckStep(self.owner.pipeline, self.member, step, tuple(missing), "simulated loss")
            )
            if isinstance(answer, messages.Refused):
                self.owner.alive = False
                return
            step = StepIndex(step + 1)
            if step % self.checkpoint_every == 0:
                yield from self._checkpoint(step)
        yield from self._checkpoint(step)
        yield Call(messages.Unregister(self.owner.pipeline, self.member, "training is complete"))
        self.done = True

    def _fetch(self, batch: Batch) -> dict[PromptIndex, None]:
        missing: dict[PromptIndex, None] = {}
        for group in batch.groups:
            gone = any(not self.living(payload.ring) for payload in group.payloads)
            if gone:
                self.faults.count("payload died with its worker")
            if gone or self.faults.strikes("payload lost", self.faults.faults.lose_payload, self.engine.now):
                missing[group.prompt] = None
        return missing

    def _publish(self, version: Version) -> Body:
        yield Sleep(self.pace.publish_s)
        digest = f"{self.owner.name}/{version}"
        yield Call(
            messages.PublishWeights(
                self.owner.pipeline, self.member, Manifest(version, self.owner.name, digest, (), "")
            )
        )

    def _checkpoint(self, step: StepIndex) -> Body:
        yield Sleep(self.pace.checkpoint_s)
        self.lineage.save(self.seen)
        yield Call(messages.AckCheckpoint(self.owner.pipeline, self.member, step, self.lineage.last_resort))

    def _beat(self) -> None:
        if self.owner.alive and not self.done:
            send_beat(self.engine, self.owner, self.member, 0.0)
            self.engine.after(self.pace.heartbeat_s, self._beat)


def send_beat(engine: Engine, owner: Owner, member: MemberId, progressed_ago_s: float) -> None:
    """One heartbeat from a process of its own, so that a wedged parent does not silence it."""
    sidecar = Owner(f"{owner.name}-sidecar", owner.pipeline)

    def beat() -> Body:
        yield Call(messages.Heartbeat(owner.pipeline, member, progressed_ago_s))

    engine.spawn(sidecar, beat())
