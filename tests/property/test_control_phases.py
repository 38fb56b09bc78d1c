"""The phase against a naive reading of the rows: derived anew from scratch after every event."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.control import effects, events
from penstock.control.phase import PHASES
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.records.ids import MemberId
from penstock.records.payload import PayloadRef
from penstock.records.rollout import FailedRollout, Rollout
from penstock.wire import messages
from profiles import examples

P = "p"


class PhaseMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.integers(1, 2),
        staleness=st.integers(0, 2),
        steps=st.sampled_from([None, 2, 3]),
        prompts=st.sampled_from([None, 1, 4, 5]),
    )
    def start(self, groups, staleness, steps, prompts):
        self.steps = 3 if steps is None and prompts is None else steps
        self.prompts = prompts
        chosen = PipelineSettings(
            name="p",
            steps=self.steps,
            prompt_limit=prompts,
            groups_per_step=groups,
            group_size=1,
            max_staleness=staleness,
            max_failures=2,
        )
        self.control = PipelineControl(chosen)
        self.groups, self.incarnation = groups, 0
        self.stopped = self.left_well = self.was_complete = False
        self.trainer_present = False
        self.start_worker()
        self.start_trainer(0)

    def send(self, event: events.Event) -> Any:
        before = self.control.phase
        sent = self.control.handle(event, 0.0)
        after = self.control.phase
        assert before == after or (before, after) in PHASES
        announced = {effect.topic for effect in sent if isinstance(effect, effects.Announce)}
        assert before == after or announced >= {"phase", "leases", "batches"}, "those who wait must learn of it"
        self.was_complete |= after == "complete"
        return sent[0] if sent else None

    @property
    def books(self):
        return self.control.ledger.state

    def naive_phase(self) -> str:
        """Everything from the rows, nothing from the counters."""
        if self.stopped:
            return "stopped"
        stages = [group.stage for group in self.books.groups.values()]
        live = sum(stage != "trained" for stage in stages)
        can_issue = bool(self.books.redo) or self.prompts is None or self.books.next_prompt < self.prompts
        finished = self.books.version == self.steps or (live == 0 and not can_issue)
        safe = self.books.durable == self.books.version or self.left_well
        if self.was_complete or (finished and safe):
            return "complete"
        lacking = self.steps is None or (self.steps - self.books.version) * self.groups > live
        return "running" if can_issue and lacking else "draining"

    def start_worker(self) -> None:
        self.incarnation += 1
        self.worker, self.request = f"w{self.incarnation}", 0
        self.send(messages.Register(P, self.worker, "rollout"))

    def start_trainer(self, step: int) -> None:
        self.incarnation += 1
        self.trainer = f"t{self.incarnation}"
        self.left_well = False
        self.send(messages.Register(P, self.trainer, "trainer", step=step))
        self.trainer_present = True

    @precondition(lambda self: not self.was_complete)
    @rule(data=st.data())
    def restart_trainer(self, data):
        self.start_trainer(data.draw(st.integers(self.books.durable, self.books.version)))

    @precondition(lambda self: self.trainer_present)
    @rule(died=st.booleans())
    def trainer_goes(self, died):
        self.left_well = not died
        self.trainer_present = False
        self.send(messages.Unregister(P, self.trainer, died=died))

    @rule(samples=st.integers(1, 4))
    def ask(self, samples):
        answer = self.send(messages.AskLease(P, self.worker, self.request, samples, self.control.newest))
        if getattr(answer, "verdict", "") == "granted":
            self.request += 1
            assert not self.stopped
            assert not self.was_complete
        else:
            final = self.control.phase in ("complete", "stopped")
            assert (answer.verdict == "exhausted") == final, "exhausted is final, so it must be true"

    @precondition(lambda self: self.books.leases)
    @rule(fate=st.sampled_from(["delivered", "delivered", "failed", "poisoned", "returned"]))
    def report(self, fate):
        sample = next(iter(self.books.leases[self.worker]))
        version = self.control.newest
        if fate == "delivered":
            rollout = Rollout(sample, version, "", 1.0, 1, PayloadRef("r", 0, sample, 0, 1, 0))
            self.send(messages.Deliver(P, self.worker, (rollout,)))
        elif fate == "returned":
            self.send(messages.Deliver(P, self.worker, returned=(sample,)))
        else:
            failure = FailedRollout(sample, "generate", "boom", fate == "poisoned")
            self.send(messages.Deliver(P, self.worker, failures=(failure,)))
            self.stopped |= self.control.state.failure != ""

    @precondition(lambda self: self.trainer_present)
    @rule(lose=st.booleans())
    def train(self, lose):
        step = self.books.version
        answer = self.send(messages.AskBatch(P, self.trainer, step))
        if isinstance(answer, messages.BatchReady):
            prompts = [group.prompt for group in answer.batch.groups]
            self.send(messages.AckStep(P, self.trainer, step, tuple(prompts[:1]) if lose else ()))
        elif isinstance(answer, messages.Complete):
            assert all(group.stage == "trained" for group in self.books.groups.values()) or step == self.steps
        else:
            assert isinstance(answer, messages.NotYet)

    @precondition(lambda self: self.trainer_present)
    @rule()
    def checkpoint(self):
        self.send(messages.AckCheckpoint(P, self.trainer, self.books.version))

    @rule()
    def stop(self):
        self.stopped = True
        self.send(messages.Stop(P, MemberId(""), "enough"))

    @precondition(lambda self: self.stopped)
    @rule()
    def resume(self):
        self.stopped = self.was_complete = self.left_well = False
        self.send(events.RunResumed())
        self.trainer_present = False
        self.start_worker()
        if not self.was_complete:
            self.start_trainer(self.books.durable)

    @invariant()
    def the_phase_follows_from_the_rows(self):
        if not hasattr(self, "control"):
            return
        assert self.control.phase == self.naive_phase()
        self.control.check()


TestPhases = PhaseMachine.TestCase
TestPhases.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
