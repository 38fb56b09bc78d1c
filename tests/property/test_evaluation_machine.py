"""Evaluation against what really happened: which weights each worker served, and what every sample was worth.

A sample's reward is a function of the version, the prompt and the member, so a result can only be right if every one of
its samples was made with its version and counted once. Workers swap weights as they are told to, and now and then
although they were told not to; the machine must notice.
"""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.control.effects import NoteEvaluation
from penstock.control.evaluation import Evaluation
from penstock.control.evaluation_state import EvaluationResult, EvaluationState
from penstock.control.settings import EvaluationSection
from penstock.records.ids import FIRST_EVALUATION_SAMPLE
from penstock.records.rollout import FailedRollout, Score
from profiles import examples

TIMEOUT_S = 50.0
workers = st.sampled_from(("a", "b", "c"))


def worth(version: int, prompt: int, member: int) -> float:
    return (7919 * version + 104729 * prompt + 31 * member) % 1009 / 1009


class EvaluationMachine(RuleBasedStateMachine):
    @initialize(every=st.integers(1, 3), prompts=st.integers(1, 3), samples=st.integers(1, 2), count=st.integers(1, 2))
    def start(self, every, prompts, samples, count):
        self.settings = EvaluationSection(
            every_steps=every, prompts=prompts, samples=samples, temperature=1.0, workers=count, timeout_s=TIMEOUT_S
        )
        self.machine = Evaluation(self.settings, EvaluationState())
        self.now = 0.0
        self.trained = 0
        self.newest: int | None = None
        self.lineage = 0
        self.serves: dict[str, tuple[int, str]] = {}
        self.held: dict[str, dict[int, tuple[int, int, tuple[int, str]]]] = {name: {} for name in "abc"}
        """By worker and sample: prompt, member, and the weights it began with."""
        self.next_due = 0
        self.due: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.seen: set[int] = set()
        self.over = False

    def digest(self, version: int) -> str:
        return f"{self.lineage if version > 0 else 0}/{version}"

    def fall_due(self, due: int) -> None:
        state = self.machine.state
        evaluations = [(result.due, result.version) for result in state.results]
        if state.running is not None:
            evaluations.append((state.running.due, state.running.version))
        if state.waiting != due and not any(due in running for running in evaluations):
            self.due[due] += 1

    @precondition(lambda self: not self.over)
    @rule(steps=st.integers(0, 2))
    def publish(self, steps):
        """The trainer made some versions and published the last of them."""
        if self.newest is None or steps:
            self.trained += steps if self.newest is not None else 0
            self._published()

    def _published(self) -> None:
        first = self.newest is None
        self.newest = self.trained
        every = self.settings.every_steps
        if first or self.newest >= self.next_due:
            self.fall_due(self.newest if first else self.newest // every * every)
            self.next_due = (self.newest // every + 1) * every
        self.machine.published(self.newest, self.now)
        self.collect()

    @precondition(lambda self: self.newest is not None)
    @rule(name=workers)
    def load(self, name):
        if not self.machine.pins(name):
            self.serves[name] = (self.newest, self.digest(self.newest))

    @precondition(lambda self: self.machine.evaluators and not self.over)
    @rule(data=st.data())
    def load_although_pinned(self, data):
        """Newer weights come, and a worker that was not to take them does."""
        self.publish(1)
        if not self.machine.evaluators:
            return
        name = data.draw(st.sampled_from(sorted(self.machine.evaluators)))
        self.serves[name] = (self.newest, self.digest(self.newest))

    @precondition(lambda self: self.newest is not None)
    @rule(name=workers, samples=st.integers(1, 6))
    def ask(self, name, samples):
        if name not in self.serves:
            self.load(name)
        version, digest = self.serves[name]
        known = digest if self.newest is not None and version >= self.newest - 2 and version <= self.newest else ""
        for lease in self.machine.grant(name, version, known, samples, self.now):
            assert lease.evaluation == version, "a worker was asked to evaluate what it does not serve"
            assert not set(lease.samples) & self.seen, "a sample number was used twice"
            assert min(lease.samples) >= FIRST_EVALUATION_SAMPLE
            self.seen |= set(lease.samples)
            for sample, member in zip(lease.samples, lease.members, strict=True):
                self.held[name][sample] = (lease.prompt, member, self.serves[name])

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), count=st.integers(1, 12), twice=st.booleans())
    def deliver(self, data, count, twice):
        self._deliver(data.draw(st.sampled_from([name for name in "abc" if self.held[name]])), count, twice)

    def _deliver(self, name: str, count: int, twice: bool) -> None:
        for sample in list(self.held[name])[:count]:
            prompt, member, (version, digest) = self.held[name].pop(sample)
            now_served = self.serves[name][0]
            score = Score(sample, version, max(version, now_served), digest, worth(version, prompt, member), 3)
            running = self.machine.state.running
            evaluated = (running.version, running.digest) if running is not None else None
            if not self.machine.take(name, score, self.now):
                assert (evaluated, now_served) == ((version, digest), version), "a mixture was counted"
            self.collect()
            if twice:
                assert self.machine.take(name, score, self.now), "a score was counted twice"

    @precondition(lambda self: self.newest is not None)
    @rule(name=workers)
    def evaluate(self, name):
        """A worker that nothing happens to: newest weights, and all that it is given, delivered at once."""
        self.load(name)
        self.ask(name, 12)
        self._deliver(name, 12, False)

    @rule(kind=st.sampled_from(("fail", "give back", "die", "restart", "stop", "resume", "roll back")), data=st.data())
    def disturb(self, kind, data):
        """One rule for all of these, or little would ever come to its end."""
        match kind:
            case "fail":
                self.fail(data.draw(workers), data.draw(st.booleans()))
            case "give back":
                self.give_back(data.draw(workers), data.draw(st.integers(1, 6)))
            case "die":
                self.die(data.draw(workers))
            case "restart":
                self.restart()
            case "stop":
                self.stop()
            case "resume":
                self.resume()
            case "roll back" if self.newest is not None and not self.over:
                self.roll_back(data.draw(st.integers(0, 3)))

    def fail(self, name, poison):
        if self.held[name]:
            sample = next(iter(self.held[name]))
            del self.held[name][sample]
            self.machine.fail(name, FailedRollout(sample, "generate", "boom", poison), self.now)
            self.collect()

    def give_back(self, name, count):
        for sample in list(self.held[name])[:count]:
            del self.held[name][sample]
            self.machine.return_sample(name, sample, self.now)

    def die(self, name):
        self.machine.release_member(name)
        self.held[name].clear()
        self.serves.pop(name, None)

    @rule(seconds=st.floats(0.1, 15.0))
    def wait(self, seconds):
        self.now += seconds
        self.machine.expire(self.now)
        self.collect()

    def roll_back(self, steps):
        """Another trainer begins at an earlier step; nothing of what came after it was ever made."""
        self.trained = max(0, self.trained - steps)
        self.lineage += 1
        state = self.machine.state
        evaluations = [(result.due, result.version or 0) for result in state.results]
        kept = [due for due, version in evaluations if max(due, version) <= self.trained]
        kept += [version for due, version in evaluations if max(due, version) <= self.trained]
        kept += [state.running.due, state.running.version] if state.running is not None else []
        kept += [state.waiting]
        for due in {due for due, version in evaluations if due <= self.trained < version} - set(kept):
            self.due[due] += 1  # measured later than it was due, and so once more
        self.machine.roll_back(self.trained, self.now)
        self.collect()
        every = self.settings.every_steps
        self.next_due = min(self.next_due, (self.trained // every + 1) * every)
        assert all((result.version or 0) <= self.trained for result in self.machine.state.results)
        self._published()
        for name in self.serves:
            self.serves[name] = (self.newest, self.digest(self.newest))

    def stop(self):
        """The run stops, and is resumed: what was not evaluated is due again."""
        state = self.machine.state
        undone = [state.running.due] if state.running is not None else []
        undone += [state.waiting] if state.waiting is not None else []
        self.machine.stop(self.now)
        assert self.machine.idle
        self.collect()
        for due in undone:
            self.fall_due(due)
        self.restart()
        self.resume()
        self.collect()

    def resume(self):
        """All processes are new."""
        for name in "abc":
            self.machine.release_member(name)
            self.held[name].clear()
        self.serves.clear()
        self.machine.resume(self.now)

    def restart(self):
        """The controller comes back from its snapshot."""
        snapshot = msgspec.msgpack.encode(self.machine.state)
        self.machine = Evaluation(self.settings, msgspec.msgpack.decode(snapshot, type=EvaluationState))
        assert msgspec.msgpack.encode(self.machine.state) == snapshot

    @precondition(lambda self: self.due.total() > 2)
    @rule()
    def end_training(self):
        self.over = True
        self.fall_due(self.newest)
        self.machine.training_ended(self.newest, self.now)
        self.collect()

    def ended_points(self) -> list[EvaluationResult]:
        notes = self.machine.take_notes("p")
        return [note.result for note in notes if isinstance(note, NoteEvaluation)]

    def collect(self) -> None:
        for result in self.ended_points():
            self.ended[result.due] += 1
            self.judge(result)

    def judge(self, result: EvaluationResult) -> None:
        if result.skipped:
            assert result.samples == 0
            return
        places = self.settings.total_samples
        assert result.version is not None
        assert result.version >= result.due
        assert result.samples + result.failed == places
        if result.failed:
            return
        prompts, samples = self.settings.prompts, self.settings.samples
        values = [worth(result.version, prompt, member) for prompt in range(prompts) for member in range(samples)]
        assert abs(result.reward_mean - sum(values) / places) < 1e-9, "samples of other versions were counted"

    @invariant()
    def books_balance(self):
        if not hasattr(self, "machine"):
            return
        self.machine.check("abc")
        state = self.machine.state
        open_points = [state.running.due] if state.running is not None else []
        open_points += [state.waiting] if state.waiting is not None else []
        assert self.due == self.ended + Counter(open_points), "an evaluation that was due is missing, or ended twice"

    def teardown(self):
        """Whatever is left ends within two deadlines."""
        if hasattr(self, "machine"):
            for _ in range(2):
                self.now += TIMEOUT_S + 1
                self.machine.expire(self.now)
                self.collect()
            assert self.machine.idle
            assert self.due == self.ended


TestEvaluation = EvaluationMachine.TestCase
TestEvaluation.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
