"""One pipeline's control: every event goes in here, everything to be done comes out.

`handle(event, now)` is the only way to change a pipeline. It is a pure function of the state, the event and the time,
so replaying the journalled events gives the same state bit for bit. `revision` grows iff the state changed: an event
that left it alone (a refused ask, a repeated delivery) need not be journalled. Every call may be repeated: a lease by
its request number, a delivery by the samples' states, a batch and its acknowledgement by the step.
"""

from __future__ import annotations

import msgspec

from penstock.control import events, lives, phase
from penstock.control.admission import Admission, watch_throttle
from penstock.control.diagnosis import Observer
from penstock.control.effects import (
    AcceptHeartbeat,
    AcceptMember,
    Announce,
    Confirm,
    Effect,
    EvictMember,
    FailRun,
    Log,
    NoteFiltered,
    RefuseCall,
    ReleasePayloads,
)
from penstock.control.evaluation import Evaluation
from penstock.control.ledger import GroupFilter, Ledger
from penstock.control.membership import Membership
from penstock.control.samples import LedgerState
from penstock.control.settings import PipelineSettings
from penstock.control.state import Outcome, PipelineState
from penstock.control.trainer_side import TrainerSide
from penstock.control.worker_side import WorkerSide
from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId, StepIndex, Version
from penstock.records.weights import Held, Manifest
from penstock.wire.messages import Phase

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
            max_losses=settings.max_losses,
            group_filter=self._filter,
            max_filtered_per_step=4 * settings.groups_per_step if filtered is None else filtered,
            state=state.ledger,
        )
        self.members = Membership(settings.patience, state.members)
        self.admission = Admission(self.ledger, settings.steps)
        self.evaluation = Evaluation(settings.evaluation, state.evaluation)
        self.observer = Observer(settings, state, self.ledger, self.members, self.admission, self.evaluation)
        self._worker_side = WorkerSide(settings, state, self.ledger, self.admission, self.evaluation)
        self._trainer_side = TrainerSide(
            settings, state, self.ledger, self.members, self.admission, self.observer, self.evaluation
        )

    def snapshot(self) -> bytes:
        """The whole state; equal states give equal bytes."""
        return _encoder.encode(self.state)

    def restore(self, snapshot: bytes) -> None:
        """Becomes the pipeline that `snapshot` was taken of, with its settings. The filter must be the same."""
        state = _decoder.decode(snapshot)
        self.settings = state.settings or self.settings
        self._adopt(state)

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
        """The highest version that engines can have: the published one, or the trained one while none is published."""
        return self.state.newest

    @property
    def oldest_trainable(self) -> Version:
        """No sample made with a lower version will ever be read."""
        return Version(self.state.ledger.version - self.settings.max_staleness)

    def demand(self) -> tuple[int, int] | None:
        """Samples that could still be leased or are out, and how many ever came to an end; None once it is over."""
        return self.observer.demand() if self.phase in ("running", "draining") else None

    def keeps_weights(self, member: MemberId, held: Held) -> bool:
        """Whether a worker is to go on serving what it serves: it evaluates that, or should, the next time it asks."""
        return self.evaluation.keeps(member, held, self.state.digests)

    def attendance(self) -> tuple[frozenset[MemberId], MemberId | None, dict[MemberId, str]]:
        """The workers there are, the trainer if there is one, and who was lost and why.

        After a trainer that left in good order nobody counts as lost.
        """
        workers = frozenset(member.member for member in self.members.having("rollout"))
        trainer = self.members.trainer()
        lost = {} if self.state.trainer_left_well else self.state.members.former
        return workers, trainer and trainer.member, lost

    def status(self, now: float) -> dict[str, float | str]:
        """Plain numbers for metrics and the live view."""
        return self.observer.status(now)

    def diagnose(self, now: float) -> str:
        """Who waits for what, since when, and who should have moved."""
        return self.observer.diagnose(now)

    def check(self) -> None:
        """Raises if an invariant of the ledger, the admission or the phase is broken."""
        self.ledger.check()
        self.evaluation.check(self.state.members.live)
        bound = (self.settings.max_staleness + 1) * self.settings.groups_per_step
        if self.ledger.live_groups > bound:
            raise InvalidTransition(f"{self.ledger.live_groups} groups are live, the staleness bound allows {bound}")
        for member in self.state.ledger.leases:
            if member not in self.state.members.live:
                raise InvalidTransition(f"{member} holds leases but is not a live member")
        if self.state.phase == "complete" and not (self.admission.finished and self.evaluation.idle):
            raise InvalidTransition("the pipeline is complete although a step or an evaluation could still be made")

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
        could_lease, awaited, newest = self.admission.can_lease(), state.ledger.awaiting_count, state.newest
        could_batch = self._trainer_side.can_give_batch(state.last_event_at)
        lacked, pinned = self.evaluation.lacks_evaluator, self.evaluation.evaluators
        excused = self._excuse_absence(now)
        effects, changed = self._decide(event, now)
        effects.extend(excused)
        if not changed and not first and not excused:
            return effects
        state.revision += 1
        state.last_event_at = now
        if not isinstance(event, events.HeartbeatHeard | events.TimePassed):
            state.progressed_at = now
            if not isinstance(event, events.RunResumed | events.SettingsTaken | events.StopAsked):
                self.members.hear(event.member, now)
        self._watch(effects, now)
        opened = not could_lease or state.ledger.awaiting_count > awaited or state.newest != newest
        lacks = self.evaluation.lacks_evaluator and (not lacked or state.newest != newest)
        if (opened and self.admission.can_lease()) or lacks:
            effects.append(Announce("leases"))
        if pinned - self.evaluation.evaluators or (lacked and not self.evaluation.lacks_evaluator):
            effects.append(Announce("weights"))
        if not could_batch and self._trainer_side.can_give_batch(now):
            effects.append(Announce("batches"))
        return effects

    def _decide(self, event: events.Event, now: float) -> Outcome:
        match event:
            case events.TimePassed():
                return self._on_time_passed(now)
            case events.HeartbeatHeard():
                return self._on_heartbeat(event, now)
            case events.MemberRegistered():
                return self._on_registered(event, now)
            case events.MemberLeft():
                return self._on_left(event, now)
            case events.RunResumed():
                return self._on_resumed(now)
            case events.SettingsTaken():
                return self._on_settings(event.settings, now)
            case events.StopAsked():
                return self._on_stop(event)
        workers_call = isinstance(event, events.LeaseAsked | events.Delivered)
        caller = self.members.caller(event.member, "rollout" if workers_call else "trainer")
        if isinstance(caller, RefuseCall):
            return [caller], False
        match event:
            case events.LeaseAsked():
                return self._worker_side.lease_asked(event, caller, now)
            case events.Delivered():
                return self._worker_side.delivered(event, now)
            case events.BatchAsked():
                return self._trainer_side.batch_asked(event, now)
            case events.StepAcked():
                return self._trainer_side.step_acked(event)
            case events.CheckpointSaved():
                return self._trainer_side.checkpoint_saved(event)
            case events.WeightsPublished():
                return self._trainer_side.weights_published(event, now)

    def _excuse_absence(self, now: float) -> list[Effect]:
        """The controller records something several times per `suspect_after_s`; a longer gap means it was away itself
        (killed, stopped, a suspended machine), and then nobody's silence counts."""
        away_s = now - self.state.last_event_at
        if away_s <= self.settings.suspect_after_s:
            return []
        self.members.excuse_all(now)
        self.evaluation.excuse(away_s)
        self.state.progressed_at = now
        line = f"the controller itself was away for {away_s:.0f} s; nobody's silence counts"
        return [Log("warning", f"{self.settings.name}: {line}")]

    def _watch(self, effects: list[Effect], now: float) -> None:
        """Draws what follows from any change: payloads nobody will read, a ready batch, the phase, the throttle."""
        state, admission = self.state, self.admission
        filtered = self.ledger.take_filtered()
        if filtered:
            effects.append(NoteFiltered(filtered))
        released = self.ledger.take_released()
        if released:
            effects.append(ReleasePayloads(released))
        if not admission.batch_is_ready():
            state.batch_ready_at = None
        elif state.batch_ready_at is None:
            state.batch_ready_at = now
        if admission.finished and state.phase in ("running", "draining"):
            self.evaluation.training_ended(state.ledger.version, now)
        if state.stop_asked:
            self.evaluation.stop(now, "the run was stopped")
        effects.extend(self.evaluation.take_notes(self.settings.name))
        prospects = phase.Prospects(
            stop_asked=state.stop_asked,
            finished=admission.finished and self.evaluation.idle,
            safe=state.ledger.durable == state.ledger.version or state.trainer_left_well,
            still_needed=admission.still_needed(),
        )
        former, state.phase = state.phase, phase.decide(state.phase, prospects)
        if state.phase != former:
            line = f"{self.settings.name}: {former} -> {state.phase} after {state.ledger.version} steps"
            effects.append(Log("info", line))
            effects.extend((Announce("phase"), Announce("leases"), Announce("batches")))
        elif prospects.finished:
            effects.append(Announce("batches"))
        closed = state.phase == "running" and not admission.can_lease()
        change = watch_throttle(state.throttle, closed=closed, now=now, report_every_s=self.settings.throttle_report_s)
        if change is not None:
            level = "info" if change.what == "still engaged" else "debug"
            effects.append(Log(level, f"{self.settings.name}: {change.line(self.ledger)}"))

    # -- members ------------------------------------------------------------------------------------------------

    def _on_registered(self, event: events.MemberRegistered, now: float) -> Outcome:
        state, ledger = self.state, self.state.ledger
        if event.member in state.members.former:
            return [RefuseCall("Stale", self.members.why_unknown(event.member))], False
        effects: list[Effect] = []
        known = self.members.get(event.member) is not None
        if event.role == "trainer":
            step = event.step if event.step is not None else StepIndex(ledger.version)
            refusal = self._trainer_side.place(step, known, effects, now)
            if refusal is not None:
                return [refusal], False
            former = self.members.trainer()
            if former is not None and former.member != event.member:
                effects.append(self._evict(former.member, f"replaced by {event.member}"))
            state.trainer_lost_at, state.trainer_left_well = None, False
        if event.prompt_count is not None and self.settings.epochs is not None:
            counted = self.settings.epochs * event.prompt_count
            if not self.ledger.limit_prompts(counted):
                line = f"{event.member} counts {counted} prompts in the run, which began with {ledger.prompt_limit}"
                effects.append(Log("warning", f"{self.settings.name}: {line}; has the environment changed?"))
        self.members.register(event, now)
        if not known:
            effects.append(Log("info", f"{self.settings.name}: {event.role} {event.member} joined"))
        answer = AcceptMember(state.phase, ledger.version, StepIndex(ledger.version))
        return [answer, *effects], True

    def _on_left(self, event: events.MemberLeft, now: float) -> Outcome:
        member = self.members.get(event.member)
        if member is None:
            return [Confirm()], False
        if member.role == "trainer":
            self.state.trainer_left_well = not (event.died or event.failed)
            self.state.trainer_lost_at = now
        gone = self._evict(event.member, event.reason or ("it died" if event.died else "it left"), died=event.died)
        effects: list[Effect] = [Confirm(), Log("info", f"{self.settings.name}: {gone.member} left: {gone.reason}")]
        return [*effects, gone] if event.died else effects, True

    def _evict(self, member: MemberId, reason: str, *, died: bool = False) -> EvictMember:
        self.members.remove(member, reason, self.state.ledger.version)
        self.ledger.lose_member(member, died=died)
        self.evaluation.lose_member(member)
        return EvictMember(member, reason)

    def _on_heartbeat(self, event: events.HeartbeatHeard, now: float) -> Outcome:
        known = self.members.get(event.member) is not None
        changed = known and self.members.beat(event, now)
        return [AcceptHeartbeat(known, self.state.phase)], changed

    # -- time and the end ---------------------------------------------------------------------------------------

    def _on_time_passed(self, now: float) -> Outcome:
        state, settings = self.state, self.settings
        effects: list[Effect] = []
        waited_enough = self._trainer_side.can_give_batch(now)
        waited_enough = waited_enough and not self._trainer_side.can_give_batch(state.last_event_at)
        changed = waited_enough or now - state.last_event_at >= settings.patience.resolution_s
        changed = self.evaluation.look(now) or changed
        for finding in self.members.look(now):
            changed = True
            level = "warning" if finding.what != "recovered" else "info"
            effects.append(Log(level, f"{settings.name}: {finding.member} {finding.what}: {finding.reason}"))
            if finding.what == "reaped":
                gone = self.members.get(finding.member)
                if gone is not None and gone.role == "trainer":
                    state.trainer_lost_at, state.trainer_left_well = now, False
                state.members.reaped += 1
                effects.append(self._evict(finding.member, finding.reason, died=True))
        unaccounted = self.ledger.conservation()
        if unaccounted and not state.stop_asked:
            effects.append(self._fail(f"the books do not balance: {unaccounted} samples are unaccounted for (a bug)"))
            changed = True
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
            return [self._fail(f"no trainer came back within {limit_s:.0f} s of the last one's end")]
        stalled_s = self.observer.stalled_s(now)
        if settings.stall_fail_after_s is not None and stalled_s > settings.stall_fail_after_s:
            return [self._fail(f"nothing moved for {stalled_s:.0f} s: {self.diagnose(now)}")]
        if stalled_s > settings.stall_after_s and now - state.stall_reported_at >= settings.stall_after_s:
            state.stall_reported_at = now
            return [Log("warning", f"{settings.name}: stalled for {stalled_s:.0f} s: {self.diagnose(now)}")]
        return []

    def _fail(self, sentence: str) -> FailRun:
        self.state.fail(f"{self.settings.name}: {sentence}")
        return FailRun(self.state.failure)

    def _on_stop(self, event: events.StopAsked) -> Outcome:
        if self.state.stop_asked:
            return [Confirm()], False
        self.state.stop_asked, self.state.stop_reason = True, event.reason
        return [Confirm(), *([self._fail(event.reason)] if event.failed else [])], True

    def _on_resumed(self, now: float) -> Outcome:
        for member in list(self.state.members.live):
            self._evict(member, "the run was resumed without it")
        self.evaluation.resume(now)
        lost = lives.forget_processes(self.state, self.ledger, now)
        line = f"resumed at step {self.state.ledger.version}; {lost} prompts are issued again"
        return [Confirm(), Log("info", f"{self.settings.name}: {line}")], True

    def _on_settings(self, wanted: PipelineSettings, now: float) -> Outcome:
        """Goes on by other settings, or by the same. What was decided by the former ones stands."""
        state, former = self.state, self.settings
        if wanted == state.settings:
            return [Confirm()], False
        if refusal := lives.why_not(state, former, wanted):
            return [RefuseCall("LocalProtocolError", refusal)], False
        if wanted.epochs != former.epochs:
            state.ledger.prompt_limit = wanted.prompt_limit
        state.settings = self.settings = wanted
        self._adopt(state)
        if wanted.evaluation is None:
            self.evaluation.stop(now, "evaluation was switched off")
        elif wanted.evaluation != former.evaluation:
            self.evaluation.resume(now)
        if state.phase == "complete" and not self.admission.finished:
            state.phase = "running"
        return [Confirm()], True
