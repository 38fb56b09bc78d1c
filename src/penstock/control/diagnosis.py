"""Status of a pipeline in numbers, and the diagnosis of a stall: which process waits, for what, and which is late."""

from __future__ import annotations

from penstock.control.admission import Admission
from penstock.control.evaluation import Evaluation
from penstock.control.ledger import Ledger
from penstock.control.membership import Member, Membership
from penstock.control.settings import PipelineSettings
from penstock.control.state import PipelineState
from penstock.records.ids import MemberId, StepIndex
from penstock.wire.messages import LOADING


class Observer:
    """Reads a pipeline's parts and never changes them."""

    def __init__(
        self,
        settings: PipelineSettings,
        state: PipelineState,
        ledger: Ledger,
        members: Membership,
        admission: Admission,
        evaluation: Evaluation,
    ) -> None:
        self.settings = settings
        self.state = state
        self.ledger = ledger
        self.members = members
        self.admission = admission
        self.evaluation = evaluation

    def status(self, now: float) -> dict[str, float | str]:
        """Plain numbers for metrics and the live view; only `phase` is a string."""
        state, ledger, table = self.state, self.ledger, self.ledger.state
        recent = state.recent
        workers, trainer = self.members.having("rollout"), self.members.trainer()
        numbers: dict[str, float | str] = {
            "phase": state.phase,
            "step": table.version,
            "steps": self.settings.steps if self.settings.steps is not None else 0,
            "version": state.weights.version if state.weights is not None else table.version,
            "durable_step": table.durable,
            "revision": state.revision,
            "issued": table.next_sample,
            "prompts_issued": table.next_prompt,
            "prompts_to_redo": len(table.redo),
            "prompts_set_aside": len(table.set_aside),
            "samples_awaiting": table.awaiting_count,
            "in_flight": ledger.in_flight,
            "capacity": self.admission.capacity(),
            "conservation_error": ledger.conservation(),
            "samples_wrong_weights": state.wrong_weights,
            "throttled": int(state.throttle.engaged_at is not None),
            "throttle_engagements": state.throttle.engagements,
            "throttled_s": round(state.throttle.engaged_s, 3),
            "workers_alive": sum(not worker.suspected for worker in workers),
            "workers_suspected": sum(worker.suspected for worker in workers),
            "workers_loading": sum(worker.blocked_by == LOADING for worker in workers),
            "members_evicted": state.members.evicted,
            "trainer_alive": int(trainer is not None and not trainer.suspected),
            "staleness_mean": _mean([step.staleness_mean for step in recent]),
            "staleness_max": max((step.staleness_max for step in recent), default=0),
            "reward_mean": recent[-1].reward_mean if recent else 0.0,
            "stalled_s": self.stalled_s(now),
        }
        numbers |= {f"samples_{name}": count for name, count in table.counts.items()}
        numbers |= {f"dropped_{name}": count for name, count in table.dropped.items()}
        numbers |= self._evaluated()
        numbers |= {f"filtered_groups_{_metric_suffix(kind)}": count for kind, count in table.filtered_by.items()}
        return numbers

    def _evaluated(self) -> dict[str, float]:
        """The newest evaluation, and counts of the others; empty if evaluation is off."""
        if not self.settings.evaluation.every_steps:
            return {}
        results = self.state.evaluation.results
        numbers: dict[str, float] = {
            "eval_running": int(not self.evaluation.idle),
            "eval_skipped": sum(bool(result.skipped) for result in results),
            "eval_points": sum(not result.skipped for result in results),
        }
        newest = next((result for result in reversed(results) if not result.skipped), None)
        if newest is not None and newest.version is not None:
            numbers |= {
                "eval_version": newest.version,
                "eval_reward": newest.reward_mean,
                "eval_reward_stderr": newest.reward_stderr,
                "eval_count": newest.samples,
            }
        return numbers

    def stalled_s(self, now: float) -> float:
        """How long the pipeline has made no progress; the startup grace is not counted.

        Progress that a trainer with a batch reports counts too.
        """
        state = self.state
        if state.started_at is None or state.phase not in ("running", "draining"):
            return 0.0
        grace_s = self.settings.startup_grace_s if state.ledger.next_sample == state.issued_before else 0.0
        moved_at = max(state.progressed_at, state.started_at + grace_s)
        trainer = self.members.trainer()
        if trainer is not None and StepIndex(state.ledger.version) in state.ledger.steps:
            moved_at = max(moved_at, trainer.progressed_at)
        return max(0.0, now - moved_at)

    def loading(self, now: float) -> bool:
        """Whether a worker makes progress in loading its engine. Loading is reported, and has its own deadline."""
        fresh = now - self.settings.stall_after_s
        workers = self.members.having("rollout")
        return any(worker.blocked_by == LOADING and worker.progressed_at > fresh for worker in workers)

    def demand(self) -> tuple[int, int]:
        """Samples that are leased or could be leased, and the number of samples that ended.

        A sample that was returned unfinished has not ended: it is issued again.
        """
        table = self.state.ledger
        ended = table.next_sample - table.counts["leased"] - table.dropped["returned"]
        return self.admission.outstanding() + self.evaluation.outstanding, ended

    def stragglers(self) -> int:
        """Groups that a full batch waits for: it would outdate them."""
        return self.ledger.stragglers(self.not_awaited())

    def not_awaited(self) -> frozenset[MemberId]:
        """Workers whose groups no batch waits for: those that evaluate, and those that were waited for in vain."""
        return self.evaluation.evaluators | self.state.not_awaited.keys()

    def awaits_stragglers(self, now: float) -> bool:
        """Whether a full batch waits for them: up to `straggler_wait_s`, and as long as the trainer is busy anyway."""
        since, wait_s = self.state.batch_ready_at, self.settings.straggler_wait_s
        return wait_s > 0 and (since is None or now - since < wait_s) and self.stragglers() > 0

    def batch_waits_for(self) -> str:
        """Names what the next batch lacks."""
        ledger, counts = self.ledger, self.state.ledger.counts
        if self.state.phase == "stopped":
            return f"nothing: the pipeline was stopped ({self.state.stop_reason})"
        if ledger.ready_groups >= ledger.groups_per_step:
            stragglers, wait_s = self.stragglers(), self.settings.straggler_wait_s
            if stragglers and wait_s:
                return f"{stragglers} groups that step {ledger.state.next_step} would outdate, at most {wait_s:g} s"
            return f"the acknowledgement of step {ledger.state.version}"
        return (
            f"{ledger.groups_per_step - ledger.ready_groups} more of {ledger.groups_per_step} groups for step "
            f"{ledger.state.next_step} ({counts['leased']} samples leased, {counts['delivered']} delivered in "
            f"incomplete groups, {ledger.state.awaiting_count} awaiting a worker)"
        )

    def diagnose(self, now: float) -> str:
        """Which process waits for what, since when, and which one should act."""
        state, table = self.state, self.state.ledger
        if state.phase == "stopped":
            return f"stopped: {state.stop_reason}."
        if state.phase == "complete":
            return f"complete after {table.version} steps; waiting for the supervisor to stop the run."
        if self.admission.finished and not self.evaluation.idle:
            return f"Training ended after {table.version} steps; its last evaluation is missing: {self.evaluation!r}."
        trainer, workers = self.members.trainer(), self.members.having("rollout")
        sentences: list[str] = []
        if trainer is None:
            lost_at = state.trainer_lost_at
            lacks = "is registered yet" if lost_at is None else f"has been registered for {now - lost_at:.0f} s"
            sentences.append(f"No trainer {lacks}: the supervisor should start one.")
        if self.admission.finished:
            lacks = f"Training ended after {table.version} steps; the last checkpoint is not confirmed"
            who = f": the trainer {trainer.member} should save it ({_liveness(trainer, now)})" if trainer else ""
            return " ".join([*sentences, f"{lacks}{who}."])
        given = table.steps.get(StepIndex(table.version))
        if trainer is not None and given is not None:
            sentences.append(
                f"The trainer {trainer.member} has held the batch of step {table.version} for "
                f"{now - given.dispatched_at:.0f} s and should acknowledge it ({_liveness(trainer, now)})."
            )
        elif given is not None:
            sentences.append(f"The batch of step {table.version} is kept for it.")
        elif self.admission.batch_is_ready() and self.awaits_stragglers(now):
            sentences.append(f"The batch of step {table.next_step} is full and waits for {self.batch_waits_for()}.")
            sentences.extend(self._explain_workers(workers, now))
        elif self.ledger.ready_groups >= self.settings.groups_per_step:
            who = (
                f": the trainer {trainer.member} should fetch it ({_liveness(trainer, now)})"
                if trainer is not None
                else ""
            )
            sentences.append(f"The batch of step {table.next_step} is ready{who}.")
        else:
            waiter = f"The trainer {trainer.member}" if trainer is not None else f"Step {table.next_step}"
            sentences.append(f"{waiter} has waited {now - state.progressed_at:.0f} s for {self.batch_waits_for()}.")
            sentences.extend(self._explain_workers(workers, now))
        return " ".join(sentences)

    def _explain_workers(self, workers: list[Member], now: float) -> list[str]:
        table = self.state.ledger
        if not workers:
            return ["No rollout worker is registered: the supervisor should start one, unless it is loading its model."]
        holders = [worker for worker in workers if self.ledger.held_by(worker.member)]
        if holders:
            return [
                f"Worker {worker.member} holds {self.ledger.held_by(worker.member)} samples and should deliver them "
                f"({_liveness(worker, now)})."
                for worker in sorted(holders, key=lambda worker: worker.progressed_at)[:3]
            ]
        if all(worker.blocked_by == LOADING for worker in workers):
            return [
                f"Worker {worker.member} cannot lease before its engine serves ({_liveness(worker, now)})."
                for worker in workers[:3]
            ]
        if not self.admission.can_lease():
            return ["No worker holds a lease and none can be granted: this is a bug in the controller."]
        needed = self.admission.min_version_awaiting()
        names = ", ".join(f"{worker.member} ({_liveness(worker, now)})" for worker in workers[:3])
        behind = [worker for worker in workers if worker.version < needed]
        if self.state.weights is None:
            return ["No weights are published: the trainer should publish the version it starts from."]
        if len(behind) == len(workers):
            return [
                f"The last leases of all {len(workers)} workers were for weights older than {needed}; they should load "
                f"newer ones: {names}."
            ]
        open_for = self.admission.capacity() + table.awaiting_count
        return [f"{len(workers)} workers are registered and could lease {open_for} samples, but none does: {names}."]


def _liveness(member: Member, now: float) -> str:
    doing = f" in {member.doing!r}" if member.doing else ""
    silent_s, idle_s = now - member.heard_at, now - member.progressed_at
    return f"last message {silent_s:.0f} s ago, last progress {idle_s:.0f} s ago{doing}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _metric_suffix(reason: str) -> str:
    """Converts a reason to a part of a metric name."""
    return "".join(letter if letter.isalnum() else "_" for letter in reason.lower())
