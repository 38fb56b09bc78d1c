"""The state machine of one pipeline: events in, effects out.

`handle(event, now)` is the only way to change a pipeline. It is a pure function of the state, the event and the time,
so replaying the journalled events gives the same state bit for bit. `revision` grows iff the state changed: an event
that changes nothing (a refused request, a repeated delivery) need not be journalled. Every call is idempotent: a lease
is identified by its request number, a delivery by the states of its samples, a batch and its acknowledgement by the
step.
"""

from __future__ import annotations

import msgspec

from penstock.control import phase
from penstock.control.admission import Admission, watch_throttle
from penstock.control.diagnosis import Observer
from penstock.control.effects import (
    Announce,
    Effect,
    EvictMember,
    FailRun,
    Log,
    NoteFiltered,
    ReleasePayloads,
)
from penstock.control.evaluation import Evaluation
from penstock.control.events import Event, ReplicaEvicted, RunResumed, SettingsTaken, TimePassed
from penstock.control.ledger import GroupFilter, Ledger
from penstock.control.membership import Member, Membership
from penstock.control.samples import LedgerState, SetAside
from penstock.control.settings import PipelineSettings
from penstock.control.state import RECENT_STEPS, PipelineState, StepSummary
from penstock.errors import InvalidTransition, LocalProtocolError, Stale
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import FIRST_EVALUATION_SAMPLE, MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Held, Manifest
from penstock.weights.published import PublishedVersions
from penstock.wire.codec import decode_section, encode_section
from penstock.wire.messages import (
    REWARD,
    AckCheckpoint,
    AckStep,
    AskBatch,
    AskLease,
    BatchReady,
    Complete,
    Deliver,
    Delivered,
    Heartbeat,
    HeartbeatSeen,
    Leased,
    NotYet,
    Ok,
    Phase,
    PublishWeights,
    Refused,
    Register,
    Registered,
    Stop,
    Unregister,
)

Outcome = tuple[list[Effect], bool]
"""The effects of one event, and whether the state changed."""

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_section)
_decoder = msgspec.msgpack.Decoder(PipelineState, dec_hook=decode_section)

# Tuples, built once: they are used at every event.
_NO_PROGRESS = (Heartbeat, TimePassed)
_OF_NO_MEMBER = (RunResumed, SettingsTaken, Stop)
_OF_WORKERS = (AskLease, Deliver)


class PipelineControl:
    def __init__(self, settings: PipelineSettings, group_filter: GroupFilter | None = None) -> None:
        self.settings = settings
        self._filter = group_filter
        self._adopt(PipelineState(ledger=LedgerState(prompt_limit=settings.prompt_limit)))

    def _adopt(self, state: PipelineState) -> None:
        settings = self.settings
        self.state = state
        self.ledger = Ledger(settings, self._filter, state.ledger)
        self.members = Membership(settings, state.members)
        self.admission = Admission(self.ledger, settings.steps)
        self.evaluation = Evaluation(settings.evaluation, state.evaluation)
        self.observer = Observer(settings, state, self.ledger, self.members, self.admission, self.evaluation)

    def snapshot(self) -> bytes:
        """The whole state; equal states give equal bytes."""
        return _encoder.encode(self.state)

    def restore(self, snapshot: bytes) -> None:
        """Restores state and settings from `snapshot`. The filter must be the same."""
        state = _decoder.decode(snapshot)
        self.settings = state.settings or self.settings
        self._adopt(state)

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        return self.state.revision

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def weights(self) -> Manifest | None:
        """The newest published weights; no others are offered."""
        return self.state.weights

    @property
    def newest(self) -> Version:
        """The highest version that engines can hold: the published one, or the trained one while none is published."""
        return self.state.newest

    @property
    def oldest_trainable(self) -> Version:
        """Samples of lower versions will not be read again."""
        return Version(self.state.ledger.version - self.settings.max_staleness)

    def demand(self) -> tuple[int, int] | None:
        """Samples that are leased or could be leased, and the number that ended; None once complete or stopped."""
        return self.observer.demand() if self.phase in ("running", "draining") else None

    def keeps_weights(self, member: MemberId, held: Held) -> bool:
        """Whether a worker should keep serving `held`: it evaluates that version, or should with its next lease."""
        return self.evaluation.keeps(member, held, self.state.published)

    def current_members(self) -> tuple[frozenset[MemberId], MemberId | None, dict[MemberId, str]]:
        """The live workers, the live trainer, and the lost members with the reasons.

        After a trainer has deregistered, no member counts as lost.
        """
        workers = frozenset(member.member for member in self.members.having("rollout"))
        trainer = self.members.trainer()
        lost = {} if self.state.trainer_left_well else self.state.members.former
        return workers, trainer and trainer.member, lost

    def status(self, now: float) -> dict[str, float | str]:
        """Plain numbers for metrics and the live view."""
        return self.observer.status(now)

    def diagnose(self, now: float) -> str:
        """Which process waits for what, since when, and which one should act."""
        return self.observer.diagnose(now)

    def slow(self, now: float) -> str:
        """What holds training back now: the `doing` of a worker whose reward function runs for long, or groups that a
        full batch waits for while the trainer is idle. Empty if there is nothing."""
        reward = next((one.doing for one in self.members.having("rollout") if one.blocked_by == REWARD), "")
        awaited = self.state.batch_ready_at is not None and self.observer.awaits_stragglers(now)
        return reward or (f"waiting for {self.observer.batch_waits_for()}" if awaited else "")

    def check(self) -> None:
        """Raises if an invariant of the ledger, the admission or the phase is broken."""
        self.ledger.check()
        self.evaluation.check(self.state.members.live)
        self.state.published.check()
        bound = (self.settings.max_staleness + 1) * self.settings.groups_per_step
        if self.ledger.live_groups > bound:
            raise InvalidTransition(f"{self.ledger.live_groups} groups are live, the staleness bound allows {bound}")
        for member in self.state.ledger.leases:
            if member not in self.state.members.live:
                raise InvalidTransition(f"{member} holds leases but is not a live member")
        if self.state.phase == "complete" and not (self.admission.finished and self.evaluation.idle):
            raise InvalidTransition("the pipeline is complete although a step or an evaluation is still possible")

    def __repr__(self) -> str:
        return f"<PipelineControl {self.settings.name} {self.phase} r{self.revision} {self.ledger} {self.members}>"

    # -- events -------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handles one event; returns its effects, the reply to the caller first."""
        state = self.state
        now = max(now, state.last_event_at)
        first = state.started_at is None
        if first:
            state.started_at = state.last_event_at = state.progressed_at = now
        could_lease, awaited, newest = self.admission.can_lease(), state.ledger.awaiting_count, state.newest
        live = len(state.members.live)  # counting workers at every event would cost more than the event
        could_batch = self._can_give_batch(state.last_event_at)
        lacked, pinned = self.evaluation.lacks_evaluator, self.evaluation.evaluators
        discounted = self._discount_gap(now)
        effects, changed = self._decide(event, now)
        effects.extend(discounted)
        if not changed and not first and not discounted:
            return effects
        state.revision += 1
        state.last_event_at = now
        if not isinstance(event, _NO_PROGRESS):
            # Workers that come and go make no progress: one that dies again and again would hide a stall.
            if not isinstance(event, Unregister) and not (isinstance(event, Register) and event.role == "rollout"):
                state.progressed_at = now
            if not isinstance(event, _OF_NO_MEMBER):
                self.members.record_call(event.member, now)
        can_lease, lacks = self._watch(effects, now), self.evaluation.lacks_evaluator
        opened = not could_lease or state.ledger.awaiting_count > awaited or state.newest != newest
        opened = opened or len(state.members.live) < live  # the share of each may have grown
        if (opened and can_lease) or (lacks and (not lacked or state.newest != newest)):
            effects.append(Announce("leases"))
        elif can_lease and isinstance(event, Deliver):
            effects.append(Announce("leases", event.member))  # it holds less than its share again
        if (lacked and not lacks) or (pinned and pinned - self.evaluation.evaluators):
            effects.append(Announce("weights"))
        if not could_batch and self._can_give_batch(now):
            effects.append(Announce("batches"))
        return effects

    def _decide(self, event: Event, now: float) -> Outcome:
        match event:
            case TimePassed():
                return self._on_time_passed(now)
            case Heartbeat():
                return self._on_heartbeat(event, now)
            case Register():
                return self._on_registered(event, now)
            case Unregister():
                return self._on_left(event, now)
            case ReplicaEvicted():
                return self._on_replica_evicted(event)
            case RunResumed():
                return self._on_resumed(now)
            case SettingsTaken():
                return self._on_settings(event.settings, now)
            case Stop():
                return self._on_stop(event)
        workers_call = isinstance(event, _OF_WORKERS)
        caller = self.members.caller(event.member, "rollout" if workers_call else "trainer")
        if isinstance(caller, Refused):
            return [caller], False
        match event:
            case AskLease():
                return self._on_ask_lease(event, caller, now)
            case Deliver():
                return self._on_deliver(event, now)
            case AskBatch():
                return self._on_ask_batch(event, now)
            case AckStep():
                return self._on_ack_step(event)
            case AckCheckpoint():
                return self._on_ack_checkpoint(event)
            case PublishWeights():
                return self._on_publish_weights(event, now)

    def _discount_gap(self, now: float) -> list[Effect]:
        """Restarts all timers after a gap in which the controller did not run (killed, stopped, a suspended machine).

        A running controller records several events per `suspect_after_s`, so a longer gap is its own."""
        away_s = now - self.state.last_event_at
        if away_s <= self.settings.suspect_after_s:
            return []
        self.members.restart_timers(now)
        self.evaluation.extend_deadlines(away_s)
        self.state.progressed_at = now
        if self.state.trainer_lost_at is not None:
            self.state.trainer_lost_at += away_s
        line = f"the controller did not run for {away_s:.0f} s; all timers start again"
        return [Log("warning", f"{self.settings.name}: {line}")]

    def _watch(self, effects: list[Effect], now: float) -> bool:
        """Updates what depends on any change: payloads without a reader, the ready batch, the phase, the throttle.
        Returns whether a lease could be granted now."""
        state, admission = self.state, self.admission
        finished = admission.finished
        filtered = self.ledger.take_filtered()
        if filtered:
            effects.append(NoteFiltered(filtered))
        released = self.ledger.take_released()
        if released:
            effects.append(ReleasePayloads(released))
        if not admission.batch_is_ready() or state.ledger.next_step > state.ledger.version:
            state.batch_ready_at = None
        elif state.batch_ready_at is None:
            state.batch_ready_at = now
        if finished and state.phase in ("running", "draining"):
            self.evaluation.training_ended(state.ledger.version, now)
        if state.stop_asked:
            self.evaluation.stop(now)
        effects.extend(self.evaluation.take_notes(self.settings.name))
        prospects = phase.Prospects(
            stop_asked=state.stop_asked,
            finished=finished and self.evaluation.idle,
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
        can_lease = admission.can_lease()
        closed = state.phase == "running" and not can_lease
        change = watch_throttle(state.throttle, closed=closed, now=now, report_every_s=self.settings.throttle_report_s)
        if change is not None:
            level = "info" if change.what == "still engaged" else "debug"
            effects.append(Log(level, f"{self.settings.name}: {change.line(self.ledger)}"))
        return can_lease

    # -- members ------------------------------------------------------------------------------------------------

    def _on_registered(self, event: Register, now: float) -> Outcome:
        state, ledger = self.state, self.state.ledger
        if event.member in state.members.former:
            return [Refused("Stale", self.members.why_unknown(event.member))], False
        effects: list[Effect] = []
        known = self.members.get(event.member) is not None
        if event.role == "trainer" and not known:  # a repeated registration has its first step, not the current
            step = event.step if event.step is not None else StepIndex(ledger.version)
            refusal = self._place_trainer(step, effects, now)
            if refusal is not None:
                return [refusal], False
            former = self.members.trainer()
            if former is not None:
                effects.extend(self._evict(former.member, f"replaced by {event.member}"))
            state.trainer_lost_at, state.trainer_left_well = None, False
        if event.prompt_count is not None and self.settings.epochs is not None:
            counted = self.settings.epochs * event.prompt_count
            if not self.ledger.limit_prompts(counted):
                line = f"{event.member} reports {counted} prompts for the run, which began with {ledger.prompt_limit}"
                effects.append(Log("warning", f"{self.settings.name}: {line}; has the environment changed?"))
        self.members.register(event, now)
        if not known:
            effects.append(Log("info", f"{self.settings.name}: {event.role} {event.member} joined"))
        answer = Registered(state.phase, ledger.version, StepIndex(ledger.version))
        return [answer, *effects], True

    def _on_left(self, event: Unregister, now: float) -> Outcome:
        member = self.members.get(event.member)
        if member is None:
            return [Ok()], False
        if member.role == "trainer":
            self.state.trainer_left_well = not (event.died or event.failed)
            self.state.trainer_lost_at = now
        reason = event.reason or ("it died" if event.died else "it left")
        gone = self._evict(event.member, reason, died=event.died)
        effects: list[Effect] = [Ok(), Log("info", f"{self.settings.name}: {event.member} left: {reason}")]
        return [*effects, *gone] if event.died else effects, True

    def _on_replica_evicted(self, event: ReplicaEvicted) -> Outcome:
        if self.members.get(event.member) is None:
            return [Ok()], False
        line = f"{self.settings.name}: {event.member} evicted: {event.reason}"
        return [Ok(), Log("info", line), *self._evict(event.member, event.reason)], True

    def _evict(self, member: MemberId, reason: str, *, died: bool = False) -> list[Effect]:
        """Removes a member. If it `died`, the prompts that it generated may be the cause."""
        self.members.remove(member, reason, self.state.ledger.version)
        self.state.not_awaited.pop(member, None)
        set_aside = self.ledger.release_member(member, died=died)
        self.evaluation.release_member(member)
        return [EvictMember(member, reason), *self._report_deadly(set_aside, member)]

    def _on_heartbeat(self, event: Heartbeat, now: float) -> Outcome:
        known = self.members.get(event.member) is not None
        changed = known and self.members.record_heartbeat(event, now)
        return [HeartbeatSeen(known, self.state.phase)], changed

    # -- time, stop and resume ----------------------------------------------------------------------------------

    def _on_time_passed(self, now: float) -> Outcome:
        state, settings = self.state, self.settings
        effects: list[Effect] = []
        waited_enough = self._can_give_batch(now)
        waited_enough = waited_enough and not self._can_give_batch(state.last_event_at)
        changed = waited_enough or now - state.last_event_at >= settings.resolution_s
        changed = self.evaluation.expire(now) or changed
        for finding in self.members.find_changes(now):
            changed = True
            level = "warning" if finding.what != "recovered" else "info"
            effects.append(Log(level, f"{settings.name}: {finding.member} {finding.what}: {finding.reason}"))
            if finding.what == "evicted":
                gone = self.members.get(finding.member)
                if gone is not None and gone.role == "trainer":
                    state.trainer_lost_at, state.trainer_left_well = now, False
                state.members.evicted += 1
                effects.extend(self._evict(finding.member, finding.reason, died=True))
                if gone is not None and now - gone.progressed_at > settings.wedged_after_s:
                    effects.extend(self._note_wedged(gone, finding.reason, now))
        unaccounted = self.ledger.conservation()
        if unaccounted and not state.stop_asked:
            effects.append(self._fail(f"{unaccounted} samples are unaccounted for; this is a bug in the controller"))
            changed = True
        if state.phase in ("running", "draining"):
            stalled = self._watch_progress(now)
            effects.extend(stalled)
            changed = changed or bool(stalled)
        return effects, changed

    def _note_wedged(self, gone: Member, reason: str, now: float) -> list[Effect]:
        """A process that hangs is replaced. If the replacement hangs too, the cause is elsewhere, and the run fails."""
        state = self.state
        if state.wedged_at is None:
            state.wedged_at = now
        if gone.registered_at <= state.wedged_at or state.stop_asked:
            return []
        since = f"for {now - state.wedged_at:.0f} s, since another process was evicted for the same reason"
        return [self._fail(f"{gone.member}: {reason}, and no sample or step arrived {since}")]

    def _watch_progress(self, now: float) -> list[Effect]:
        """Logs a stall after `stall_after_s`; fails the run after `stall_fail_after_s`, or without a trainer."""
        state, settings = self.state, self.settings
        limit_s = settings.exit_without_trainer_s
        if limit_s is not None and state.trainer_lost_at is not None and now - state.trainer_lost_at > limit_s:
            return [self._fail(f"no trainer registered within {limit_s:.0f} s after the last one ended")]
        stalled_s = self.observer.stalled_s(now)
        if stalled_s > settings.stall_fail_after_s and not self.observer.loading(now):
            return [self._fail(f"no progress for {stalled_s:.0f} s: {self.diagnose(now)}")]
        if stalled_s > settings.stall_after_s and now - state.stall_reported_at >= settings.stall_after_s:
            state.stall_reported_at = now
            return [Log("warning", f"{settings.name}: stalled for {stalled_s:.0f} s: {self.diagnose(now)}")]
        return []

    def _fail(self, sentence: str) -> FailRun:
        self.state.fail(f"{self.settings.name}: {sentence}")
        return FailRun(self.state.failure)

    def _on_stop(self, event: Stop) -> Outcome:
        if self.state.stop_asked:
            return [Ok()], False
        self.state.stop_asked, self.state.stop_reason = True, event.reason
        return [Ok(), *([self._fail(event.reason)] if event.failed else [])], True

    def _on_resumed(self, now: float) -> Outcome:
        for member in list(self.state.members.live):
            self._evict(member, "the run was resumed without it")
        self.evaluation.resume(now)
        lost = self._forget_processes(now)
        if self.state.phase == "complete":
            self.state.phase = "draining"  # complete again once its trainer has loaded the last checkpoint
        line = f"resumed at step {self.state.ledger.version}; {lost} prompts are issued again"
        return [Ok(), Log("info", f"{self.settings.name}: {line}")], True

    def _forget_processes(self, now: float) -> int:
        """Drops all processes and untrained samples; returns the number of prompts that are issued again."""
        state = self.state
        lost = self.ledger.lose_payloads()
        self.ledger.reset_durable()
        self.ledger.take_released()
        state.members.rings.clear()
        state.members.departed_rings.clear()
        state.weights, state.stop_asked, state.stop_reason, state.failure = None, False, "", ""
        state.published = PublishedVersions()
        state.started_at = state.progressed_at = now
        state.issued_before = state.ledger.next_sample
        state.trainer_lost_at, state.trainer_left_well, state.set_aside_in_a_row = None, False, 0
        state.wedged_at = None
        return lost

    def _on_settings(self, new: PipelineSettings, now: float) -> Outcome:
        """Continues with these settings. Earlier decisions stay."""
        state, former = self.state, self.settings
        if new == state.settings:
            return [Ok()], False
        if refusal := self._settings_refusal(new):
            return [Refused("LocalProtocolError", refusal)], False
        if new.epochs != former.epochs:
            state.ledger.prompt_limit = new.prompt_limit
        state.settings = self.settings = new
        self._adopt(state)
        if not new.evaluation.every_steps:
            self.evaluation.switch_off(now)
        elif new.evaluation != former.evaluation:
            self.evaluation.resume(now)
        if state.phase == "complete" and not self.admission.finished:
            state.phase = "running"
        return [Ok()], True

    def _settings_refusal(self, new: PipelineSettings) -> str:
        """Why a run that began with the current settings cannot continue with these; empty if it can."""
        former, table = self.settings, self.state.ledger
        if new.group_size != former.group_size and table.next_sample:
            return f"rollout.group_size must stay {former.group_size}, the size of the groups in the journal"
        if new.filters != former.filters and table.next_sample:
            return f"train.filters must stay {list(former.filters)}, which filtered the groups in the journal"
        if new.steps is not None and new.steps < table.version:
            return f"steps must be at least {table.version}, which are trained already; found {new.steps}"
        return ""

    # -- workers ------------------------------------------------------------------------------------------------

    def _on_ask_lease(self, event: AskLease, member: Member, now: float) -> Outcome:
        state = self.state
        if event.request == member.request:
            return [Leased(member.granted, "granted", state.phase)], False
        if event.request < member.request:
            sentence = f"lease request {event.request} of {event.member} is outdated"
            return [Refused("Stale", f"{sentence}: its latest is {member.request}")], False
        if event.samples < 1:
            return [Refused("LocalProtocolError", f"{event.member} requested {event.samples} samples")], False
        if state.phase in ("complete", "stopped"):
            return [Leased((), "exhausted", state.phase)], False
        moves = state.evaluation.moves
        usable = self.admission.min_version_awaiting() <= event.version <= state.newest
        held, workers = self.ledger.held_by(event.member), event.workers or self._workers()
        budget = self.admission.share(event.samples, held=held, workers=workers, call=event.call)
        leases = self._grant_evaluation(event, now) or (self._grant(event, budget) if usable else ())
        if not leases:
            available = (budget > 0 and self.admission.can_lease()) or self.evaluation.lacks_evaluator
            behind = event.version != state.newest and available
            verdict = Leased((), "version_too_old" if behind else "throttled", state.phase)
            return [verdict], state.evaluation.moves > moves
        member.request, member.granted, member.version = event.request, leases, event.version
        return [Leased(leases, "granted", state.phase)], True

    def _grant_evaluation(self, event: AskLease, now: float) -> tuple[PromptLease, ...]:
        """Evaluations come first: they are small, have a deadline, and keep their workers from newer weights."""
        if not event.steady or event.version > self.state.newest:
            return ()
        digest = self.state.published.valid.get(event.version, "")
        return tuple(self.evaluation.grant(event.member, event.version, digest, event.samples, now))

    def _workers(self) -> int:
        """The number of workers that share the leases: those registered or those configured, if more."""
        return max(1, self.settings.workers, len(self.members.having("rollout")))

    def _grant(self, event: AskLease, budget: int) -> tuple[PromptLease, ...]:
        """Leases single members of open groups first, then whole groups; a small request gets part of one group."""
        ledger, admission = self.ledger, self.admission
        leases = ledger.lease_awaiting(event.member, budget, admission.min_version_awaiting())
        budget -= sum(len(lease.samples) for lease in leases)
        whole = min(event.samples, ledger.group_size)
        while budget > 0 and ledger.prompts_left and admission.capacity() >= ledger.group_size:
            min_version = admission.min_version_fresh()
            if event.version < min_version or budget < (ledger.group_size if leases else whole):
                break
            leases.append(ledger.lease_group(event.member, budget, event.version, min_version))
            budget -= ledger.group_size
        return tuple(leases)

    def _on_deliver(self, event: Deliver, now: float) -> Outcome:
        ledger, evaluation = self.ledger, self.evaluation
        moves, aside = ledger.state.moves, len(ledger.state.set_aside)
        failed, wrong = ledger.state.dropped["failed"], self.state.wrong_weights
        evaluated = evaluation.state.moves
        refused = [(one.sample, why) for one in event.rollouts if (why := self._take_rollout(event.member, one))]
        if len(refused) < len(event.rollouts):
            self.state.not_awaited.pop(event.member, None)
        # A sample that is refused for its weights was still generated: the environment works. A repeated one moves
        # nothing.
        if ledger.state.moves - moves > ledger.state.dropped["failed"] - failed:
            self.state.set_aside_in_a_row, self.state.wedged_at = 0, None
        refused += [(one.sample, why) for one in event.failures if (why := self._take_failure(event.member, one, now))]
        refused += [(sample, why) for sample in event.returned if (why := self._take_back(event.member, sample, now))]
        refused += [(one.sample, why) for one in event.scores if (why := evaluation.take(event.member, one, now))]
        reason = "; ".join(f"sample {sample} {why}" for sample, why in refused[:4])
        effects: list[Effect] = [Delivered(tuple(sample for sample, _ in refused), reason)]
        if count := self.state.wrong_weights - wrong:
            line = f"{self.settings.name}: {count} samples of {event.member} are refused: {reason}"
            effects.append(Log("warning", line))
        effects.extend(self._report_failing(len(ledger.state.set_aside) - aside))
        return effects, ledger.state.moves > moves or evaluation.state.moves > evaluated

    def _take_rollout(self, member: MemberId, rollout: Rollout) -> str:
        """Records a rollout if it was generated with published weights. If none are published, accepts any."""
        digests = self.state.published.valid
        expected = digests.get(rollout.version)
        wrong = bool(digests) and rollout.weights_digest != expected
        if wrong and rollout.version <= self.state.newest and self._reject(member, rollout.sample):
            published = f"is {expected!r}" if expected is not None else "was not published"
            return f"was generated with weights {rollout.weights_digest!r}, but version {rollout.version} {published}"
        return self.ledger.deliver(member, rollout, self.state.newest)

    def _take_failure(self, member: MemberId, failure: FailedRollout, now: float) -> str:
        if failure.sample >= FIRST_EVALUATION_SAMPLE:
            return self.evaluation.fail(member, failure, now)
        return self.ledger.fail(member, failure)

    def _take_back(self, member: MemberId, sample: SampleId, now: float) -> str:
        if sample >= FIRST_EVALUATION_SAMPLE:
            return self.evaluation.return_sample(member, sample, now)
        return self.ledger.return_sample(member, sample)

    def _reject(self, member: MemberId, sample: SampleId) -> bool:
        rejected = self.ledger.reject(member, sample)
        self.state.wrong_weights += rejected
        return rejected

    def _report_failing(self, set_aside: int) -> list[Effect]:
        """Logs the last prompt that was set aside for its failures, and why."""
        if not set_aside:
            return []
        prompt, aside = next(reversed(self.state.ledger.set_aside.items()))
        line = f"{self.settings.name}: prompt {prompt} set aside after {aside.failures} failures in {aside.hook}"
        return [Log("warning", f"{line}: {aside.error}"), *self._count_set_aside(set_aside, aside)]

    def _report_deadly(self, set_aside: list[PromptIndex], member: MemberId) -> list[Effect]:
        """Logs the prompts that were set aside because this and other workers died. One death counts once."""
        if not set_aside:
            return []
        why = f"since {self.settings.max_losses} workers died while they generated them, the last was {member}"
        line = f"{self.settings.name}: prompts set aside, {why}: {', '.join(map(str, set_aside))}"
        return [Log("warning", line), *self._count_set_aside(1, self.state.ledger.set_aside[set_aside[-1]])]

    def _count_set_aside(self, count: int, last: SetAside) -> list[Effect]:
        """Fails the run if prompts were set aside too often without a success."""
        state, settings = self.state, self.settings
        state.set_aside_in_a_row += count
        if state.set_aside_in_a_row < settings.set_aside_in_a_row_allowed or state.stop_asked:
            return []
        cause = last.error.strip().splitlines()[-1] if last.error.strip() else "no message"
        times = f"prompts were set aside {state.set_aside_in_a_row} times in a row"
        return [self._fail(f"{times}; the last in {last.hook}: {cause}")]

    # -- the trainer --------------------------------------------------------------------------------------------

    def _place_trainer(self, step: StepIndex, effects: list[Effect], now: float) -> Refused | None:
        """Moves the ledger to the step at which a new trainer starts, or returns why that is impossible."""
        state, table = self.state, self.ledger.state
        if step > table.version:
            if step != table.version + 1 or table.version not in table.steps:
                sentence = f"the trainer starts at step {step}, but the journal has only {table.version} trained steps"
                return Refused("RunFailed", f"{sentence}; resume with an older checkpoint")
            self.ledger.acknowledge(StepIndex(table.version), ())
            line = f"step {step - 1} was in the trainer's checkpoint but never acknowledged"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        if step < table.version and state.phase == "complete":
            done = f"training is complete after {table.version} steps and its workers have left"
            lost = f"the trainer restarts at step {step}, so its last checkpoint is damaged or missing"
            return Refused("RunFailed", f"{done}, but {lost}; resume the run to train the missing steps again")
        if step < table.version:
            trained = table.version
            try:
                redone = self.ledger.roll_back(step)
            except Stale as error:
                what = "start it from the newest checkpoint, or a new run if that is damaged"
                return Refused("RunFailed", f"{error}; {what}")
            line = f"training rolled back from step {trained} to {step}; {redone} prompts are issued again"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        else:
            self.ledger.undo_after(step)
        if state.weights is not None and state.weights.version > step:
            state.weights = None
        state.published.withdraw_after(step)
        self.evaluation.roll_back(Version(step), now)
        self.ledger.found(step)
        return None

    def _can_give_batch(self, now: float) -> bool:
        """Whether the next batch may be sent now: it is ready, and no straggler is left or the wait has ended."""
        return self.admission.batch_is_ready() and not self.observer.awaits_stragglers(now)

    def _on_ask_batch(self, event: AskBatch, now: float) -> Outcome:
        state, table, steps = self.state, self.ledger.state, self.settings.steps
        if event.step < table.version:
            sentence = f"step {event.step} is acknowledged already, the next is {table.version}"
            return [Refused("LocalProtocolError", f"{sentence}; a restarted trainer registers with its step")], False
        if event.step in table.steps:
            return [self._batch(event.step)], False
        if self.admission.finished or event.step == steps:
            if self._last_evaluation_is_missing():  # until then the trainer provides the last weights
                return [NotYet("the evaluation of the last version", state.phase)], False
            return [Complete(StepIndex(table.version))], False
        if event.step > table.version + 1:
            sentence = f"step {event.step} was requested, but the next to acknowledge is {table.version}"
            return [Refused("LocalProtocolError", sentence)], False
        if event.step != table.next_step or not self._can_give_batch(now) or state.phase == "stopped":
            return [NotYet(self.observer.batch_waits_for(), state.phase)], False
        rest = self.admission.drained and self.ledger.ready_groups <= self.settings.groups_per_step
        final = event.step + 1 == steps or (rest and table.next_step == table.version)
        wait_s = self.settings.straggler_wait_s
        late, holders = self.ledger.drop_stragglers(self.observer.not_awaited()) if wait_s else (0, [])
        state.not_awaited |= dict.fromkeys(holders)
        self.ledger.dispatch(final=final, now=now)
        state.batch_ready_at = None  # the next batch waits for its own stragglers
        effects: list[Effect] = [self._batch(event.step)]
        if late:
            line = f"step {event.step} waited {wait_s:g} s (train.straggler_wait_s) for {late} groups of"
            line += f" {', '.join(holders)}: they are outdated now and generated again. No step waits for these workers"
            effects.append(Log("warning", f"{self.settings.name}: {line} until they deliver in time"))
        return effects, True

    def _last_evaluation_is_missing(self) -> bool:
        if self.evaluation.settings is None or self.state.phase == "stopped":
            return False
        return not self.admission.finished or not self.evaluation.idle

    def _batch(self, step: StepIndex) -> BatchReady:
        given = self.ledger.state.steps[step]
        groups: list[BatchGroup] = []
        rings: dict[str, None] = {}
        for prompt in given.prompts:
            group = self.ledger.state.groups[prompt]
            payloads = tuple([payload for payload in group.payloads if payload is not None])
            rings.update({payload.ring: None for payload in payloads})
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
        return BatchReady(Batch(step, tuple(groups), given.final), addresses)

    def _on_ack_step(self, event: AckStep) -> Outcome:
        state, ledger = self.state, self.ledger
        given = ledger.state.steps.get(event.step)
        try:
            changed = ledger.acknowledge(event.step, event.missing_prompts)
        except LocalProtocolError as error:
            return [Refused("LocalProtocolError", error.message)], False
        if not changed or given is None:
            return [Ok()], False
        trained = len(given.prompts) * ledger.group_size
        figures = given.reward_mean, given.staleness_mean, given.staleness_max, given.length_mean
        summary = StepSummary(event.step, trained, *figures)
        state.recent = [*state.recent[1 - RECENT_STEPS :], summary]
        state.wedged_at = None
        self.members.forget_rings(ledger.state.version - self.settings.max_staleness - 1)
        effects: list[Effect] = [Ok()]
        if event.missing_prompts:
            line = f"step {event.step} was trained without {len(event.missing_prompts)} groups: {event.missing_reason}"
            effects.append(Log("warning", f"{self.settings.name}: {line}"))
        return effects, True

    def _on_ack_checkpoint(self, event: AckCheckpoint) -> Outcome:
        try:
            return [Ok()], self.ledger.settle(event.step, event.last_resort)
        except LocalProtocolError as error:
            return [Refused("LocalProtocolError", error.message)], False

    def _on_publish_weights(self, event: PublishWeights, now: float) -> Outcome:
        state, manifest = self.state, event.manifest
        version, trained = manifest.version, self.ledger.state.version
        if not 0 <= version <= trained + 1:
            sentence = f"weights version {version} was published, but only {trained} steps were trained"
            return [Refused("LocalProtocolError", sentence)], False
        if manifest == state.weights or (state.weights is not None and version < state.weights.version):
            return [Ok()], False
        state.weights = manifest
        state.published.add(manifest)
        if state.phase != "complete":
            self.evaluation.published(version, now)
        return [Ok(), Announce("weights")], True
