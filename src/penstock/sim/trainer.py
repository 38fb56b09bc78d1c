"""One incarnation of a simulated trainer: fetches ahead, takes its turn on the devices, trains, publishes, saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.records.batch import Batch
from penstock.records.ids import MemberId, PipelineName, PromptIndex, StepIndex, Version
from penstock.records.pool import Priority
from penstock.records.weights import Held, Manifest
from penstock.sim.actors import LONG_POLL_S, Lineage, Pace, send_beat
from penstock.sim.engine import Body, Call, Engine, Owner, Signal, Sleep, Until
from penstock.sim.faults import FaultLog, WholeFaults
from penstock.sim.fetching import Fetched, SimFetcher
from penstock.sim.floor import Floor
from penstock.sim.front_desk import AskCheckpoint, Publish
from penstock.sim.replica import Artifacts
from penstock.sim.turns import SimTurns
from penstock.wire import messages


class Prepared(msgspec.Struct):
    """One step's data, ready to train; no batch when training is complete."""

    step: StepIndex
    batch: Batch | None
    fetched: Fetched


class WholeTrainer:
    def __init__(
        self,
        engine: Engine,
        name: str,
        pipeline: str,
        lineage: Lineage,
        artifacts: Artifacts,
        faults: FaultLog,
        settings: WholeFaults,
        pace: Pace,
        *,
        checkpoint_every: int,
        scores: bool,
        floor: Floor,
        make_fetcher: Callable[[Owner], SimFetcher],
        trains: Callable[[Batch, Fetched], None],
    ) -> None:
        """With `scores` every step first asks a reference. `trains` sees every batch with the payloads at the moment
        they are trained on."""
        self.owner = Owner(name, PipelineName(pipeline))
        self.member = MemberId(name)
        self.busy_s = 0.0
        self.done = False
        self.fetcher = make_fetcher(self.owner)
        self.holding: list[Fetched] = []
        """What was fetched and is neither trained nor given up."""
        self.seen: list[list[PromptIndex]] = list(lineage.prompts)
        self._engine = engine
        self._lineage = lineage
        self._artifacts = artifacts
        self._digests: dict[Version, str] = {}
        self._faults = faults
        self._settings = settings
        self._pace = pace
        self._checkpoint_every = checkpoint_every
        self._trains = trains
        self._ready: Prepared | None = None
        self._fed = Signal()
        self._offered: Version | None = None
        self._publishing = False
        self._offer_came = Signal()
        self._published = Signal()
        self._between_steps = Signal()
        self._locked = False
        self._scores = scores
        self._turns = SimTurns(self.owner, self.member, floor)
        engine.spawn(self.owner, self._main(lineage.step))

    def _main(self, step: StepIndex) -> Body:
        registered = messages.Register(self.owner.pipeline, self.member, "trainer", step=step, lineage=self.owner.name)
        if not isinstance((yield Call(registered)), messages.Registered):
            self.owner.alive = False
            return
        self._beat()
        self._spawn(self._prepare(step))
        yield from self._turns.take(Priority.INITIALISATION)
        yield from self._publish(Version(step), durable=False)
        if self._ready is None:
            yield from self._turns.give_back()
        self._spawn(self._publish_newest())
        self._spawn(self._heed_checkpoints())
        while True:
            while self._ready is None or self._ready.step != step:
                yield Until(self._fed)
            prepared = self._ready
            if prepared.batch is None:
                break
            self._spawn(self._prepare(StepIndex(step + 1)))
            if self._scores:
                yield from self._turns.take(Priority.SCORING)
                yield Sleep(self._pace.score_s)
            yield from self._turns.take(Priority.TRAINING)
            yield from self._lock()
            yield from self._train(prepared, prepared.batch)
            self._unlock()
            step = StepIndex(step + 1)
            if step % self._checkpoint_every == 0:
                yield from self._lock()
                yield from self._save()
                self._unlock()
        yield from self._lock()
        yield from self._save()
        self._turns.move_out()
        yield Call(messages.Unregister(self.owner.pipeline, self.member, "training is complete"))
        self.done = True

    # -- one step -----------------------------------------------------------------------------------------------

    def _prepare(self, step: StepIndex) -> Body:
        """Asks for a step's batch and fetches its payloads while the step before it trains."""
        answer: Any = None
        while not isinstance(answer, messages.BatchReady | messages.Complete):
            answer = yield from self._call(messages.AskBatch(self.owner.pipeline, self.member, step), LONG_POLL_S)
        prepared = Prepared(step, None, Fetched())
        if isinstance(answer, messages.BatchReady):
            prepared.batch = answer.batch
            self.holding.append(prepared.fetched)
            refs = [ref for group in answer.batch.groups for ref in group.payloads]
            yield from self.fetcher.fetch(refs, answer.rings, prepared.fetched)
        self._ready = prepared
        self._engine.fire(self._fed)

    def _train(self, prepared: Prepared, batch: Batch) -> Body:
        fetched = prepared.fetched
        missing = tuple(group.prompt for group in batch.groups if any(ref in fetched.missing for ref in group.payloads))
        for _ in missing:
            self._faults.count("group missing")
        reason = next((f"{why.kind}: {why.detail}" for why in fetched.missing.values()), "")
        yield Sleep(self._pace.step_s)
        self._trains(batch, fetched)
        self.busy_s += self._pace.step_s
        yield from self._turns.give_back()
        self.seen.append([group.prompt for group in batch.groups if group.prompt not in missing])
        self._offered = Version(batch.step + 1)
        self._engine.fire(self._offer_came)
        yield from self._call(messages.AckStep(self.owner.pipeline, self.member, batch.step, missing, reason))
        self.fetcher.consumed(fetched)
        self.holding.remove(fetched)

    # -- weights and checkpoints --------------------------------------------------------------------------------

    def _publish_newest(self) -> Body:
        """In the background; a version that a newer one overtakes is never written."""
        while True:
            if self._offered is None:
                self._publishing = False
                self._engine.fire(self._published)
                yield Until(self._offer_came)
            version, self._offered = self._offered, None
            if version is not None:
                self._publishing = True
                yield from self._publish(version, durable=False)

    def _publish(self, version: Version, *, durable: bool) -> Body:
        yield Sleep(self._pace.publish_s)
        manifest = Manifest(version, self.owner.name, self._digest(version), (), "")
        strikes = self._faults.strikes("artifact damaged", self._settings.damage_artifact, self._engine.now)
        self._artifacts.publish(manifest, damaged=strikes and not durable)
        yield from self._call(Publish(messages.PublishWeights(self.owner.pipeline, self.member, manifest), durable))

    def _digest(self, version: Version) -> str:
        """The same each time; now and then that of the version before, as after a step without a gradient."""
        if version not in self._digests:
            before = self._digests.get(Version(version - 1))
            same = before and self._faults.strikes("step changed nothing", self._settings.equal_bytes, self._engine.now)
            self._digests[version] = before if before and same else f"{self.owner.name}/{version}"
        return self._digests[version]

    def _save(self) -> Body:
        yield Sleep(self._pace.checkpoint_s)
        self._lineage.save(self.seen)
        step = StepIndex(len(self.seen))
        while self._offered is not None or self._publishing:
            yield Until(self._published)
        self._artifacts.make_durable(Held(Version(step), self._digest(Version(step))))
        yield from self._call(messages.AckCheckpoint(self.owner.pipeline, self.member, step, self._lineage.last_resort))

    def _heed_checkpoints(self) -> Body:
        """Saves whenever the controller asks for it, and publishes afresh."""
        while not self.done:
            wanted = yield Call(AskCheckpoint(self.member), LONG_POLL_S)
            if wanted and not self.done:
                self._faults.count("emergency checkpoint")
                yield from self._lock()
                while self._offered is not None or self._publishing:
                    yield Until(self._published)
                yield from self._publish(Version(len(self.seen)), durable=True)
                yield from self._save()
                self._unlock()

    def _lock(self) -> Body:
        """Held while the weights and what the controller knows of them differ."""
        while self._locked:
            yield Until(self._between_steps)
        self._locked = True

    def _unlock(self) -> None:
        self._locked = False
        self._engine.fire(self._between_steps)

    # -- life ---------------------------------------------------------------------------------------------------

    def _call(self, request: object, wait_s: float = 0.0) -> Body:
        """A refusal ends this process: the controller knows another trainer."""
        answer = yield Call(request, wait_s)
        if isinstance(answer, messages.Refused):
            self.owner.alive = False
            yield Sleep(0.0)
        return answer

    def _spawn(self, body: Body) -> None:
        self._engine.spawn(self.owner, body)

    def _beat(self) -> None:
        if self.owner.alive and not self.done:
            send_beat(self._engine, self.owner, self.member, 0.0)
            self._engine.after(self._pace.heartbeat_s, self._beat)
