"""The trainer's side of a pipeline: batches out, acknowledgements, checkpoints and weights in."""

from __future__ import annotations

from penstock.control import events
from penstock.control.admission import Admission
from penstock.control.diagnosis import Observer
from penstock.control.effects import (
    Announce,
    Confirm,
    ConfirmComplete,
    DeferBatch,
    Effect,
    GiveBatch,
    Log,
    OfferWeights,
    RefuseCall,
)
from penstock.control.evaluation import Evaluation
from penstock.control.ledger import Ledger
from penstock.control.membership import Membership
from penstock.control.settings import PipelineSettings
from penstock.control.state import RECENT_STEPS, Outcome, PipelineState, StepSummary
from penstock.errors import LocalProtocolError, Stale
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import StepIndex, Version


class TrainerSide:
    """Answers the live trainer. A batch and its acknowledgement are known by the step, so repeating them is safe."""

    def __init__(
        self,
        settings: PipelineSettings,
        state: PipelineState,
        ledger: Ledger,
        members: Membership,
        admission: Admission,
        observer: Observer,
        evaluation: Evaluation,
    ) -> None:
        self.settings = settings
        self.state = state
        self.ledger = ledger
        self.members = members
        self.admission = admission
        self.observer = observer
        self.evaluation = evaluation

    def place(self, step: StepIndex, known: bool, effects: list[Effect], now: float) -> RefuseCall | None:
        """Brings the ledger to the step a (re)started trainer begins with, or says why that cannot be."""
        state, books = self.state, self.ledger.state
        if step > books.version and not known:
            if step != books.version + 1 or books.version not in books.steps:
                sentence = (
                    f"the trainer starts at step {step}, but the journal knows only {books.version} trained steps"
                )
                return RefuseCall("RunFailed", f"{sentence}; resume with an older checkpoint")
            self.ledger.acknowledge(StepIndex(books.version), ())
            line = f"step {step - 1} was in the trainer's checkpoint but never acknowledged"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        if step < books.version and state.phase == "complete":
            sentence = f"training is complete after {books.version} steps; a trainer at step {step} comes too late"
            return RefuseCall("RunFailed", sentence)
        if step < books.version:
            trained = books.version
            try:
                redone = self.ledger.roll_back(step)
            except Stale as error:
                return RefuseCall("RunFailed", f"{error}; start it from the newest checkpoint")
            line = f"training rolled back from step {trained} to {step}; {redone} prompts are issued again"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        elif not known:
            self.ledger.undo_after(step)
        if not known:
            if state.weights is not None and state.weights.version > step:
                state.weights = None
            for version in [version for version in state.digests if version > step]:
                del state.digests[version]
            self.evaluation.roll_back(Version(step), now)
        return None

    def can_give_batch(self, now: float) -> bool:
        """Whether the next step's batch may leave now: it is ready, and waits for nobody or has waited enough."""
        since = self.state.batch_ready_at
        if since is None or not self.admission.batch_is_ready():
            return False
        return now - since >= self.settings.straggler_wait_s or not self.ledger.overtaken_groups()

    def batch_asked(self, event: events.BatchAsked, now: float) -> Outcome:
        state, books, steps = self.state, self.ledger.state, self.settings.steps
        if event.step < books.version:
            sentence = f"step {event.step} was acknowledged already, the next is {books.version}"
            return [RefuseCall("LocalProtocolError", f"{sentence}; a restarted trainer registers with its step")], False
        if event.step in books.steps:
            return [self._batch(event.step)], False
        if self.admission.finished or event.step == steps:
            if self._last_evaluation_is_missing():  # until then the trainer is where the last weights come from
                return [DeferBatch("the evaluation of the last version", state.phase)], False
            return [ConfirmComplete(StepIndex(books.version))], False
        if event.step > books.version + 1:
            sentence = f"step {event.step} was asked for, the next to acknowledge is {books.version}"
            return [RefuseCall("LocalProtocolError", sentence)], False
        if event.step != books.next_step or not self.can_give_batch(now) or state.phase == "stopped":
            return [DeferBatch(self.observer.batch_waits_for(), state.phase)], False
        rest = self.admission.drained and self.ledger.ready_groups <= self.settings.groups_per_step
        final = event.step + 1 == steps or (rest and books.next_step == books.version)
        self.ledger.dispatch(final=final, now=now)
        return [self._batch(event.step)], True

    def _last_evaluation_is_missing(self) -> bool:
        if self.evaluation.settings is None or self.state.phase == "stopped":
            return False
        return not self.admission.finished or not self.evaluation.idle

    def _batch(self, step: StepIndex) -> GiveBatch:
        given = self.ledger.state.steps[step]
        groups: list[BatchGroup] = []
        rings: dict[str, None] = {}
        for prompt in given.prompts:
            group = self.ledger.state.groups[prompt]
            payloads = tuple(payload for payload in group.payloads if payload is not None)
            rings.update(dict.fromkeys(payload.ring for payload in payloads))
            groups.append(
                BatchGroup(
                    prompt=prompt,
                    attempt=group.attempt,
                    samples=tuple(group.samples),
                    rewards=tuple(group.rewards),
                    versions=tuple(group.versions),
                    lengths=tuple(group.lengths),
                    payloads=payloads,
                )
            )
        known = self.state.members.rings
        addresses = tuple(known[ring] for ring in rings if ring in known)
        return GiveBatch(Batch(step, tuple(groups), given.final), addresses)

    def step_acked(self, event: events.StepAcked) -> Outcome:
        state, ledger = self.state, self.ledger
        given = ledger.state.steps.get(event.step)
        try:
            changed = ledger.acknowledge(event.step, event.missing_prompts)
        except LocalProtocolError as error:
            return [RefuseCall("LocalProtocolError", error.message)], False
        if not changed or given is None:
            return [Confirm()], False
        trained = len(given.prompts) * ledger.group_size
        summary = StepSummary(event.step, trained, given.reward_mean, given.staleness_mean, given.staleness_max)
        state.recent = [*state.recent[1 - RECENT_STEPS :], summary]
        self.members.forget_rings(ledger.state.version - self.settings.max_staleness - 1)
        effects: list[Effect] = [Confirm()]
        if event.missing_prompts:
            line = f"step {event.step} was trained without {len(event.missing_prompts)} groups: {event.missing_reason}"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        return effects, True

    def checkpoint_saved(self, event: events.CheckpointSaved) -> Outcome:
        try:
            return [Confirm()], self.ledger.settle(event.step, event.last_resort)
        except LocalProtocolError as error:
            return [RefuseCall("LocalProtocolError", error.message)], False

    def weights_published(self, event: events.WeightsPublished, now: float) -> Outcome:
        state, manifest = self.state, event.manifest
        version, trained = manifest.version, self.ledger.state.version
        if not 0 <= version <= trained + 1:
            sentence = f"weights version {version} were published, but only {trained} steps were trained"
            return [RefuseCall("LocalProtocolError", sentence)], False
        if manifest == state.weights or (state.weights is not None and version < state.weights.version):
            return [Confirm()], False
        state.weights = manifest
        state.digests[version] = manifest.digest
        for old in [old for old in state.digests if old < version - self.settings.max_staleness - 1]:
            del state.digests[old]
        if state.phase != "complete":
            self.evaluation.published(version, now)
        return [Confirm(), OfferWeights(manifest), Announce("weights")], True
