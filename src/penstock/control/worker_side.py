"""The workers' side of a pipeline: leases out, rollouts in."""

from __future__ import annotations

from penstock.control import events
from penstock.control.admission import Admission
from penstock.control.effects import AcceptDelivery, Effect, FailRun, GrantLeases, Log, RefuseCall, RefuseLease
from penstock.control.evaluation import Evaluation
from penstock.control.ledger import Ledger
from penstock.control.membership import Member
from penstock.control.settings import PipelineSettings
from penstock.control.state import Outcome, PipelineState
from penstock.records.ids import FIRST_EVALUATION_SAMPLE, MemberId, SampleId
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout


class WorkerSide:
    """Answers live rollout workers. Repeating a call never changes anything a second time."""

    def __init__(
        self,
        settings: PipelineSettings,
        state: PipelineState,
        ledger: Ledger,
        admission: Admission,
        evaluation: Evaluation,
    ) -> None:
        self.settings = settings
        self.state = state
        self.ledger = ledger
        self.admission = admission
        self.evaluation = evaluation

    def lease_asked(self, event: events.LeaseAsked, member: Member, now: float) -> Outcome:
        state = self.state
        if event.request == member.request:
            return [GrantLeases(member.granted, state.phase)], False
        if event.request < member.request:
            sentence = f"lease request {event.request} of {event.member} was answered long ago"
            return [RefuseCall("Stale", f"{sentence}: its latest is {member.request}")], False
        if event.samples < 1:
            return [RefuseCall("LocalProtocolError", f"{event.member} asked for {event.samples} samples")], False
        if state.phase in ("complete", "stopped"):
            return [RefuseLease("exhausted", state.phase)], False
        moves = state.evaluation.moves
        usable = self.admission.min_version_awaiting() <= event.version <= state.newest
        leases = self._grant_evaluation(event, now) or (self._grant(event) if usable else ())
        if not leases:
            wanted = self.admission.can_lease() or self.evaluation.lacks_evaluator
            behind = event.version != state.newest and wanted
            verdict = RefuseLease("version_too_old" if behind else "throttled", state.phase)
            return [verdict], state.evaluation.moves > moves
        member.request, member.granted, member.version = event.request, leases, event.version
        return [GrantLeases(leases, state.phase)], True

    def _grant_evaluation(self, event: events.LeaseAsked, now: float) -> tuple[PromptLease, ...]:
        """Before all else: a point is small, has a deadline, and keeps its evaluators from newer weights."""
        if not event.steady or event.version > self.state.newest:
            return ()
        digest = self.state.digests.get(event.version, "")
        return tuple(self.evaluation.grant(event.member, event.version, digest, event.samples, now))

    def _grant(self, event: events.LeaseAsked) -> tuple[PromptLease, ...]:
        """Single members of begun groups first, then whole groups; a small ask gets part of one group."""
        ledger, admission = self.ledger, self.admission
        budget = admission.share(event.samples, event.waiting)
        leases = ledger.lease_awaiting(event.member, budget, admission.min_version_awaiting())
        budget -= sum(len(lease.samples) for lease in leases)
        while budget > 0 and ledger.prompts_left and admission.capacity() >= ledger.group_size:
            min_version = admission.min_version_fresh()
            if event.version < min_version or (leases and budget < ledger.group_size):
                break
            leases.append(ledger.lease_group(event.member, budget, event.version, min_version))
            budget -= ledger.group_size
        return tuple(leases)

    def delivered(self, event: events.Delivered, now: float) -> Outcome:
        ledger, evaluation = self.ledger, self.evaluation
        moves, aside = ledger.state.moves, len(ledger.state.set_aside)
        evaluated = evaluation.state.moves
        verdicts = [(rollout.sample, self._take(event.member, rollout)) for rollout in event.rollouts]
        if ledger.state.moves > moves and any(not why for _, why in verdicts):  # not if it was only repeated
            self.state.set_aside_in_a_row = 0
        verdicts += [(failure.sample, self._fail(event.member, failure, now)) for failure in event.failures]
        verdicts += [(sample, self._give_back(event.member, sample, now)) for sample in event.returned]
        verdicts += [(score.sample, evaluation.take(event.member, score, now)) for score in event.scores]
        refused = tuple(sample for sample, why in verdicts if why)
        reasons = [f"sample {sample} {why}" for sample, why in verdicts if why]
        effects: list[Effect] = [AcceptDelivery(refused, "; ".join(reasons[:4]))]
        effects.extend(self._mourn(len(ledger.state.set_aside) - aside))
        return effects, ledger.state.moves > moves or evaluation.state.moves > evaluated

    def _take(self, member: MemberId, rollout: Rollout) -> str:
        """Books a rollout if it was made with published weights; as long as none are published, all are taken."""
        digests = self.state.digests
        expected = digests.get(rollout.version)
        wrong = bool(digests) and rollout.weights_digest != expected
        if wrong and rollout.version <= self.state.newest and self._reject(member, rollout.sample):
            published = f"is {expected!r}" if expected is not None else "was not published"
            return f"was made with weights {rollout.weights_digest!r}, but version {rollout.version} {published}"
        return self.ledger.deliver(member, rollout, self.state.newest)

    def _fail(self, member: MemberId, failure: FailedRollout, now: float) -> str:
        if failure.sample >= FIRST_EVALUATION_SAMPLE:
            return self.evaluation.fail(member, failure, now)
        return self.ledger.fail(member, failure)

    def _give_back(self, member: MemberId, sample: SampleId, now: float) -> str:
        if sample >= FIRST_EVALUATION_SAMPLE:
            return self.evaluation.give_back(member, sample, now)
        return self.ledger.give_back(member, sample)

    def _reject(self, member: MemberId, sample: SampleId) -> bool:
        rejected = self.ledger.reject(member, sample)
        self.state.wrong_weights += rejected
        return rejected

    def _mourn(self, set_aside: int) -> list[Effect]:
        """Says which prompt was set aside and why; ends the run when nothing but failures comes in."""
        if not set_aside:
            return []
        state, settings = self.state, self.settings
        state.set_aside_in_a_row += set_aside
        prompt, aside = next(reversed(state.ledger.set_aside.items()))
        line = f"{settings.name}: prompt {prompt} set aside after {aside.failures} failures in {aside.hook}"
        effects: list[Effect] = [Log("warning", f"{line}: {aside.error}")]
        if state.set_aside_in_a_row >= settings.set_aside_in_a_row_allowed and not state.stop_asked:
            cause = aside.error.strip().splitlines()[-1] if aside.error.strip() else "no message"
            many = f"{state.set_aside_in_a_row} prompts in a row failed and none succeeded"
            state.fail(f"{settings.name}: {many}; the last in {aside.hook}: {cause}")
            effects.append(FailRun(state.failure))
        return effects
