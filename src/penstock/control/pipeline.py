"""One pipeline's control: every event goes in here, everything to be done comes out.

`handle(event, now)` is the only way to change a pipeline. It is a pure function of the state, the event and the time,
so replaying the journalled events gives the same state bit for bit. `revision` grows iff the state changed: an event
that left it alone (a refused ask, a repeated delivery) need not be journalled. Every call may be repeated: a lease by
its request number, a delivery by the samples' states, a batch and its acknowledgement by the step.
"""

from __future__ import annotations

import msgspec

from penstock.control import events, phase
from penstock.control.admission import Admission, ThrottleChange, watch_throttle
from penstock.control.diagnosis import Observer
from penstock.control.effects import (
    AcceptDelivery,
    AcceptHeartbeat,
    AcceptMember,
    Announce,
    Confirm,
    ConfirmComplete,
    DeferBatch,
    Effect,
    EvictMember,
    FailRun,
    GiveBatch,
    GrantLeases,
    Log,
    OfferWeights,
    RefuseCall,
    RefuseLease,
    ReleasePayloads,
)
from penstock.control.ledger import GroupFilter, Ledger
from penstock.control.membership import Member, Membership
from penstock.control.samples import LedgerState
from penstock.control.settings import RECENT_STEPS, PipelineSettings, PipelineState, StepSummary
from penstock.errors import InvalidTransition, LocalProtocolError, Stale
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import MemberId, SampleId, StepIndex, Version
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Manifest
from penstock.wire.messages import Phase

Outcome = tuple[list[Effect], bool]
"""What to do, and whether the state changed."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PipelineState)


class PipelineControl:
    def __init__(self, settings: PipelineSettings, group_filter: GroupFilter | None = None) -> None:
        self.settings = settings
        self._filter = group_filter
        self._adopt(PipelineState(ledger=LedgerState(prompt_limit=settings.prompt_limit)))

    def _adopt(self, state: PipelineState) -> None:
        settings = self.settings
        filtered = settings.max_filtered_per_step
        self.state = state
        self.ledger = Ledger(
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            max_staleness=settings.max_staleness,
            max_failures=settings.max_failures,
            group_filter=self._filter,
            max_filtered_per_step=4 * settings.groups_per_step if filtered is None else filtered,
            state=state.ledger,
        )
        self.members = Membership(settings.patience, state.members)
        self.admission = Admission(self.ledger, settings.steps)
        self._observer = Observer(settings, state, self.ledger, self.members, self.admission)

    def snapshot(self) -> bytes:
        """The whole state; equal states give equal bytes."""
        return _encoder.encode(self.state)

    def restore(self, snapshot: bytes) -> None:
        """Becomes the pipeline that `snapshot` was taken of. The settings and the filter must be the same."""
        self._adopt(_decoder.decode(snapshot))

    # -- what one may ask ---------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        return self.state.revision

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def weights(self) -> Manifest | None:
        """The newest published weights: the only ones ever offered."""
        return self.state.weights

    @property
    def newest(self) -> Version:
        """The highest version that exists: samples of higher ones come from a trainer that is gone."""
        weights = self.state.weights
        return max(self.ledger.state.version, weights.version if weights is not None else Version(0))

    @property
    def drained(self) -> bool:
        """Nothing but complete groups is left, and nothing more can be issued."""
        return self.ledger.open_groups == 0 and not self.ledger.prompts_left

    @property
    def finished(self) -> bool:
        """No sample, buffered or in flight, can fill a further step."""
        if self.ledger.state.version == self.settings.steps:
            return True
        return self.drained and self.ledger.live_groups == 0

    def can_give_batch(self) -> bool:
        """Whether the next step's batch could be formed now; the last one may be partial."""
        ledger, steps = self.ledger, self.settings.steps
        if steps is not None and ledger.state.next_step >= steps:
            return False
        if ledger.ready_groups >= ledger.groups_per_step:
            return True
        alone = ledger.state.next_step == ledger.state.version
        return alone and self.drained and ledger.ready_groups > 0

    def status(self, now: float) -> dict[str, float | str]:
        """Plain numbers for metrics and the live view."""
        return self._observer.status(now)

    def diagnose(self, now: float) -> str:
        """Who waits for what, since when, and who should have moved."""
        return self._observer.diagnose(now)

    def check(self) -> None:
        """Raises if an invariant of the ledger, the admission or the phase is broken."""
        self.ledger.check()
        bound = (self.settings.max_staleness + 1) * self.settings.groups_per_step
        if self.ledger.live_groups > bound:
            raise InvalidTransition(f"{self.ledger.live_groups} groups are live, the staleness bound allows {bound}")
        for member in self.state.ledger.leases:
            if member not in self.state.members.live:
                raise InvalidTransition(f"{member} holds leases but is not a live member")
        if self.state.phase == "complete" and not self.finished:
            raise InvalidTransition("the pipeline is complete although samples could still fill a step")

    def __repr__(self) -> str:
        return f"<PipelineControl {self.settings.name} {self.phase} r{self.revision} {self.ledger} {self.members}>"

    # -- events -------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """Takes one event; returns what to do about it, the answer to the caller first."""
        state = self.state
        now = max(now, state.last_event_at)
        first = state.started_at is None
        if first:
            state.started_at = state.last_event_at = state.progressed_at = now
        could_lease, awaited = self.admission.can_lease(), state.ledger.awaiting_count
        could_batch = self.can_give_batch()
        match event:
            case events.LeaseAsked():
                effects, changed = self._on_lease_asked(event)
            case events.Delivered():
                effects, changed = self._on_delivered(event)
            case events.BatchAsked():
                effects, changed = self._on_batch_asked(event, now)
            case events.StepAcked():
                effects, changed = self._on_step_acked(event)
            case events.HeartbeatHeard():
                effects, changed = self._on_heartbeat(event, now)
            case events.TimePassed():
                effects, changed = self._on_time_passed(now)
            case events.MemberRegistered():
                effects, changed = self._on_registered(event, now)
            case events.MemberLeft():
                effects, changed = self._on_left(event, now)
            case events.CheckpointSaved():
                effects, changed = self._on_checkpoint(event)
            case events.WeightsPublished():
                effects, changed = self._on_weights(event)
            case events.RunResumed():
                effects, changed = self._on_resumed(now)
            case events.StopAsked():
                effects, changed = self._on_stop(event)
        if not changed and not first:
            return effects
        state.revision += 1
        state.last_event_at = now
        if not isinstance(event, events.HeartbeatHeard | events.TimePassed):
            state.progressed_at = now
            if not isinstance(event, events.RunResumed | events.StopAsked):
                self.members.hear(event.member, now)
        self._watch(effects, now)
        if self.admission.can_lease() and (not could_lease or state.ledger.awaiting_count > awaited):
            effects.append(Announce("leases"))
        if self.can_give_batch() and not could_batch:
            effects.append(Announce("batches"))
        return effects

    def _watch(self, effects: list[Effect], now: float) -> None:
        """Draws what follows from any change: the phase, the throttle, payloads nobody will read."""
        state = self.state
        if self.ledger.released:
            effects.append(ReleasePayloads(tuple(self.ledger.released)))
            self.ledger.released.clear()
        prospects = phase.Prospects(
            stop_asked=state.stop_asked,
            finished=self.finished,
            safe=state.ledger.durable == state.ledger.version or state.trainer_left_well,
            still_needed=self.admission.still_needed(),
        )
        former, state.phase = state.phase, phase.decide(state.phase, prospects)
        if state.phase != former:
            effects.append(Log("info", f"{self.settings.name}: {former} -> {state.phase} at step {self.newest}"))
            effects.extend((Announce("phase"), Announce("leases"), Announce("batches")))
        elif self.finished:
            effects.append(Announce("batches"))
        closed = state.phase == "running" and not self.admission.can_lease()
        change = watch_throttle(state.throttle, closed=closed, now=now, report_every_s=self.settings.throttle_report_s)
        if change is not None:
            effects.append(self._throttle_line(change))

    def _throttle_line(self, change: ThrottleChange) -> Log:
        counts = self.state.ledger.counts
        held = ", ".join(f"{counts[name]} {name}" for name in ("leased", "delivered", "buffered", "dispatched"))
        lasted = f" after {change.lasted_s:.1f} s" if change.lasted_s else ""
        line = f"{self.settings.name}: throttle {change.what}{lasted} at step {self.ledger.state.version}: {held}"
        return Log("info" if change.what == "still engaged" else "debug", line)

    # -- members ------------------------------------------------------------------------------------------------

    def _on_registered(self, event: events.MemberRegistered, now: float) -> Outcome:
        state, ledger = self.state, self.state.ledger
        if event.member in state.members.former:
            return [RefuseCall("Stale", self.members.why_unknown(event.member))], False
        effects: list[Effect] = []
        known = self.members.get(event.member) is not None
        step = event.step if event.step is not None else StepIndex(ledger.version)
        if event.role == "trainer":
            refusal = self._place_trainer(step, known, effects)
            if refusal is not None:
                return [refusal], False
            former = self.members.trainer()
            if former is not None and former.member != event.member:
                effects.append(self._evict(former.member, f"replaced by {event.member}"))
            state.trainer_lost_at, state.trainer_left_well = None, False
        if event.prompt_count is not None and self.settings.epochs is not None and ledger.prompt_limit is None:
            ledger.prompt_limit = self.settings.epochs * event.prompt_count
        self.members.register(event, now)
        if not known:
            effects.append(Log("info", f"{self.settings.name}: {event.role} {event.member} joined"))
        answer = AcceptMember(state.phase, ledger.version, StepIndex(ledger.version))
        return [answer, *effects], True

    def _place_trainer(self, step: StepIndex, known: bool, effects: list[Effect]) -> RefuseCall | None:
        """Brings the ledger to the step a (re)started trainer begins with, or says why that cannot be."""
        state, ledger = self.state, self.state.ledger
        if step > ledger.version and not known:
            if step != ledger.version + 1 or ledger.version not in ledger.steps:
                sentence = (
                    f"the trainer starts at step {step}, but the journal knows only {ledger.version} trained steps"
                )
                return RefuseCall("RunFailed", f"{sentence}; resume with an older checkpoint")
            self.ledger.acknowledge(StepIndex(ledger.version), ())
            effects.append(Log("warning", f"step {step - 1} was in the trainer's checkpoint but never acknowledged"))
        if step < ledger.version:
            trained = ledger.version
            try:
                redone = self.ledger.roll_back(step)
            except Stale as error:
                return RefuseCall("RunFailed", f"{error}; the checkpoint it was started from is not the newest")
            line = f"training rolled back from step {trained} to {step}; {redone} prompts are issued again"
            effects.append(Log("warning", line))
        elif not known:
            self.ledger.undo_after(step)
        if not known:
            if state.weights is not None and state.weights.version > step:
                state.weights = None
            for version in [version for version in state.digests if version > step]:
                del state.digests[version]
        return None

    def _on_left(self, event: events.MemberLeft, now: float) -> Outcome:
        member = self.members.get(event.member)
        if member is None:
            return [Confirm()], False
        if member.role == "trainer":
            self.state.trainer_left_well = not event.died
            self.state.trainer_lost_at = now
        gone = self._evict(event.member, event.reason or ("it died" if event.died else "it left"))
        effects: list[Effect] = [Confirm(), Log("info", f"{self.settings.name}: {gone.member} left: {gone.reason}")]
        return [*effects, gone] if event.died else effects, True

    def _evict(self, member: MemberId, reason: str) -> EvictMember:
        self.members.remove(member, reason, self.state.ledger.version)
        self.ledger.lose_member(member)
        return EvictMember(member, reason)

    def _on_heartbeat(self, event: events.HeartbeatHeard, now: float) -> Outcome:
        known = self.members.get(event.member) is not None
        changed = known and self.members.beat(event, now)
        return [AcceptHeartbeat(known, self.state.phase)], changed

    # -- samples ------------------------------------------------------------------------------------------------

    def _on_lease_asked(self, event: events.LeaseAsked) -> Outcome:
        state = self.state
        member = self._caller(event.member, "rollout")
        if isinstance(member, RefuseCall):
            return [member], False
        if event.request == member.request:
            return [GrantLeases(member.granted, state.phase)], False
        if event.request < member.request:
            sentence = f"lease request {event.request} of {event.member} was answered long ago"
            return [RefuseCall("Stale", f"{sentence}: its latest is {member.request}")], False
        if event.samples < 1:
            return [RefuseCall("LocalProtocolError", f"{event.member} asked for {event.samples} samples")], False
        if state.phase in ("complete", "stopped"):
            return [RefuseLease("exhausted", state.phase)], False
        if event.version > self.newest or event.version < self.admission.min_version_awaiting():
            return [RefuseLease("version_too_old", state.phase)], False
        leases = self._grant(event)
        if not leases:
            verdict = "version_too_old" if self.admission.can_lease() else "throttled"
            return [RefuseLease(verdict, state.phase)], False
        member.request, member.granted, member.version = event.request, leases, event.version
        return [GrantLeases(leases, state.phase)], True

    def _grant(self, event: events.LeaseAsked) -> tuple[PromptLease, ...]:
        ledger, admission = self.ledger, self.admission
        budget = admission.share(event.samples, event.waiting)
        leases = ledger.lease_awaiting(event.member, budget, admission.min_version_awaiting())
        budget -= sum(len(lease.samples) for lease in leases)
        while budget > 0 and ledger.prompts_left and admission.capacity() >= ledger.group_size:
            min_version = admission.min_version_fresh(self.newest)
            if event.version < min_version or (leases and budget < ledger.group_size):
                break
            leases.append(ledger.lease_group(event.member, budget, min_version))
            budget -= ledger.group_size
        return tuple(leases)

    def _on_delivered(self, event: events.Delivered) -> Outcome:
        member = self._caller(event.member, "rollout")
        if isinstance(member, RefuseCall):
            return [member], False
        state, ledger = self.state, self.ledger
        moves, aside = ledger.state.moves, len(ledger.state.set_aside)
        refused: list[SampleId] = []
        reasons: list[str] = []
        for rollout in event.rollouts:
            why = self._take_rollout(event.member, rollout)
            if why:
                refused.append(rollout.sample)
                reasons.append(f"sample {rollout.sample} {why}")
        booked = [(failure.sample, ledger.fail(event.member, failure)) for failure in event.failures]
        booked += [(sample, ledger.give_back(event.member, sample)) for sample in event.returned]
        for sample, why in booked:
            if why:
                refused.append(sample)
                reasons.append(f"sample {sample} {why}")
        effects: list[Effect] = [AcceptDelivery(tuple(refused), "; ".join(reasons[:4]))]
        set_aside = len(ledger.state.set_aside) - aside
        if len(event.rollouts) > len(refused):
            state.set_aside_in_a_row = 0
        if set_aside:
            state.set_aside_in_a_row += set_aside
            effects.extend(self._mourn(event.failures[-1] if event.failures else None))
        return effects, ledger.state.moves > moves

    def _take_rollout(self, member: MemberId, rollout: Rollout) -> str:
        expected = self.state.digests.get(rollout.version)
        if (
            expected is not None
            and rollout.weights_digest != expected
            and self.ledger.state_of(rollout.sample) == "leased"
        ):
            self.state.wrong_weights += 1
            self.ledger.reject(member, rollout.sample)
            return f"was made with weights {rollout.weights_digest!r}, but version {rollout.version} is {expected!r}"
        return self.ledger.deliver(member, rollout, self.newest)

    def _mourn(self, failure: FailedRollout | None) -> list[Effect]:
        state, settings = self.state, self.settings
        prompt, aside = next(reversed(state.ledger.set_aside.items()))
        line = f"{settings.name}: prompt {prompt} set aside after {aside.failures} failures in {aside.hook}"
        effects: list[Effect] = [Log("warning", f"{line}: {aside.error}")]
        if state.set_aside_in_a_row >= settings.set_aside_in_a_row_allowed and not state.stop_asked:
            hook, error = (failure.hook, failure.error) if failure is not None else (aside.hook, aside.error)
            last = error.strip().splitlines()[-1] if error.strip() else "no message"
            sentence = (
                f"{state.set_aside_in_a_row} prompts in a row failed and none succeeded; the last in {hook}: {last}"
            )
            effects.append(self._fail(sentence))
        return effects

    # -- steps --------------------------------------------------------------------------------------------------

    def _on_batch_asked(self, event: events.BatchAsked, now: float) -> Outcome:
        member = self._caller(event.member, "trainer")
        if isinstance(member, RefuseCall):
            return [member], False
        state, ledger = self.state, self.ledger.state
        if event.step < ledger.version:
            sentence = f"step {event.step} was acknowledged already, the next is {ledger.version}"
            return [RefuseCall("LocalProtocolError", f"{sentence}; a restarted trainer registers with its step")], False
        if event.step in ledger.steps:
            return [self._batch(event.step)], False
        if self.finished or event.step == self.settings.steps:
            return [ConfirmComplete(StepIndex(ledger.version))], False
        if event.step > ledger.version + 1:
            return [
                RefuseCall("LocalProtocolError", f"step {event.step} was asked for, the next is {ledger.version}")
            ], False
        if event.step != ledger.next_step or not self.can_give_batch() or state.phase == "stopped":
            return [DeferBatch(self._observer.batch_waits_for(), state.phase)], False
        last = self.drained and self.ledger.ready_groups <= self.settings.groups_per_step
        final = event.step + 1 == self.settings.steps or (last and ledger.next_step == ledger.version)
        self.ledger.dispatch(final=final, now=now)
        return [self._batch(event.step)], True

    def _batch(self, step: StepIndex) -> GiveBatch:
        books = self.ledger.state.steps[step]
        groups = []
        rings: dict[str, None] = {}
        for prompt in books.prompts:
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
        return GiveBatch(Batch(step, tuple(groups), books.final), addresses)

    def _on_step_acked(self, event: events.StepAcked) -> Outcome:
        member = self._caller(event.member, "trainer")
        if isinstance(member, RefuseCall):
            return [member], False
        state, ledger = self.state, self.ledger
        books = ledger.state.steps.get(event.step)
        try:
            changed = ledger.acknowledge(event.step, event.missing_prompts)
        except LocalProtocolError as error:
            return [RefuseCall("LocalProtocolError", error.message)], False
        if not changed or books is None:
            return [Confirm()], False
        trained = len(books.prompts) * ledger.group_size
        summary = StepSummary(event.step, trained, books.reward_mean, books.staleness_mean, books.staleness_max)
        state.recent = [*state.recent[1 - RECENT_STEPS :], summary]
        self.members.forget_rings(ledger.state.version - self.settings.max_staleness - 1)
        effects: list[Effect] = [Confirm()]
        if event.missing_prompts:
            line = f"step {event.step} was trained without {len(event.missing_prompts)} groups: {event.missing_reason}"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        return effects, True

    def _on_checkpoint(self, event: events.CheckpointSaved) -> Outcome:
        member = self._caller(event.member, "trainer")
        if isinstance(member, RefuseCall):
            return [member], False
        try:
            return [Confirm()], self.ledger.settle(event.step)
        except LocalProtocolError as error:
            return [RefuseCall("LocalProtocolError", error.message)], False

    def _on_weights(self, event: events.WeightsPublished) -> Outcome:
        member = self._caller(event.member, "trainer")
        if isinstance(member, RefuseCall):
            return [member], False
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
        return [Confirm(), OfferWeights(manifest), Announce("weights")], True

    # -- time and the end -----------------------------------------------------------------------------------------

    def _on_time_passed(self, now: float) -> Outcome:
        state, settings = self.state, self.settings
        away_s = now - state.last_event_at
        if away_s > settings.suspect_after_s:
            self.members.excuse_all(now)
            state.progressed_at = now
            line = f"{settings.name}: the controller itself was away for {away_s:.0f} s; nobody's silence counts"
            return [Log("warning", line)], True
        effects: list[Effect] = []
        changed = away_s >= settings.patience.resolution_s
        for finding in self.members.look(now):
            changed = True
            level = "warning" if finding.what != "recovered" else "info"
            effects.append(Log(level, f"{settings.name}: {finding.member} {finding.what}: {finding.reason}"))
            if finding.what == "reaped":
                gone = self.members.get(finding.member)
                if gone is not None and gone.role == "trainer":
                    state.trainer_lost_at, state.trainer_left_well = now, False
                state.members.reaped += 1
                effects.append(self._evict(finding.member, finding.reason))
        if state.phase in ("running", "draining"):
            stalled = self._watch_progress(now)
            effects.extend(stalled)
            changed = changed or bool(stalled)
        return effects, changed

    def _watch_progress(self, now: float) -> list[Effect]:
        """Speaks up when nothing moved for too long, and ends the run when nothing moved for far too long."""
        state, settings = self.state, self.settings
        limit_s = settings.exit_without_trainer_s
        if limit_s is not None and state.trainer_lost_at is not None and now - state.trainer_lost_at > limit_s:
            return [self._fail(f"{settings.name}: no trainer came back within {limit_s:.0f} s of the last one's end")]
        stalled_s = self._observer.stalled_s(now)
        if settings.stall_fail_after_s is not None and stalled_s > settings.stall_fail_after_s:
            return [self._fail(f"{settings.name}: nothing moved for {stalled_s:.0f} s: {self.diagnose(now)}")]
        if stalled_s > settings.stall_after_s and now - state.stall_reported_at >= settings.stall_after_s:
            state.stall_reported_at = now
            return [Log("warning", f"{settings.name}: stalled for {stalled_s:.0f} s: {self.diagnose(now)}")]
        return []

    def _fail(self, sentence: str) -> FailRun:
        self.state.stop_asked, self.state.failure, self.state.stop_reason = True, sentence, sentence
        return FailRun(sentence)

    def _on_stop(self, event: events.StopAsked) -> Outcome:
        if self.state.stop_asked:
            return [Confirm()], False
        self.state.stop_asked, self.state.stop_reason = True, event.reason
        return [Confirm(), *([self._fail(event.reason)] if event.failed else [])], True

    def _on_resumed(self, now: float) -> Outcome:
        state = self.state
        for member in list(state.members.live):
            self._evict(member, "the run was resumed without it")
        lost = self.ledger.lose_payloads()
        self.ledger.released.clear()
        state.members.rings.clear()
        state.members.departed_rings.clear()
        state.weights, state.stop_asked, state.stop_reason, state.failure = None, False, "", ""
        state.digests.clear()
        state.started_at = state.progressed_at = now
        state.trainer_lost_at, state.trainer_left_well, state.set_aside_in_a_row = None, False, 0
        line = f"{self.settings.name}: resumed at step {state.ledger.version}; {lost} prompts are issued again"
        return [Confirm(), Log("info", line)], True

    def _caller(self, member: MemberId, role: str) -> Member | RefuseCall:
        found = self.members.get(member)
        if found is None:
            return RefuseCall("Stale", self.members.why_unknown(member))
        if found.role != role:
            return RefuseCall("LocalProtocolError", f"{member} is a {found.role}; this call is for a {role}")
        return found
