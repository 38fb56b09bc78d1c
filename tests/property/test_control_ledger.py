"""The pipeline against a naive model that keeps one row per sample and counts by looking.

The model predicts what becomes of every delivered, failed, returned and lost sample, checks every lease and batch it is
given against its own rows, and recounts everything after every step. At the end a well-behaved worker and trainer must
be able to finish the run, whatever happened before.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Ids are written plainly here.

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.control import events
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.records.payload import PayloadRef
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Manifest
from penstock.wire import messages
from penstock.wire.codec import decode_section, encode_section
from profiles import examples

P = "p"

LIVE = ("leased", "delivered", "buffered", "dispatched")


@dataclasses.dataclass
class Row:
    sample: int
    prompt: int
    attempt: int
    member: int
    owner: str
    state: str = "leased"
    version: int = -1
    reward: float = 0.0
    step: int = -1


class Naive:
    """One row per sample ever issued; every answer is found by scanning them."""

    def __init__(self, group_size: int, max_staleness: int, max_failures: int) -> None:
        self.rows: dict[int, Row] = {}
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.max_failures = max_failures
        self.failures: Counter[tuple[int, int]] = Counter()
        self.set_aside: set[int] = set()
        self.filtered: set[int] = set()
        self.version = self.next_step = 0
        self.checkpoints = [0]
        """Steps of those on disk, oldest first."""

    def live(self, prompt: int) -> list[Row]:
        return [row for row in self.rows.values() if row.prompt == prompt and row.state in (*LIVE, "trained")]

    def drop(self, rows: list[Row], reason: str) -> None:
        for row in rows:
            row.state = f"dropped {reason}"

    def lease(self, lease: Any, owner: str) -> None:
        fresh = not self.live(lease.prompt)
        for sample, member in zip(lease.samples, lease.members, strict=True):
            assert sample not in self.rows
            assert all(row.member != member for row in self.live(lease.prompt)), "two samples for one member"
            assert lease.prompt not in self.set_aside | self.filtered
            self.rows[sample] = Row(sample, lease.prompt, lease.attempt, member, owner)
        if not fresh:
            assert {row.attempt for row in self.live(lease.prompt)} == {lease.attempt}

    def deliver(self, sample: int, owner: str, version: int, reward: float, newest: int, judge: Any) -> bool:
        row = self.rows.get(sample)
        if row is None or row.owner != owner or row.state.startswith("dropped"):
            return False
        if row.state != "leased":
            return row.state != "trained" or row.step >= self.checkpoints[0]
        if version > newest:
            self.drop([row], "outdated")
            return False
        if version < self.next_step - self.max_staleness:
            self.drop(self.live(row.prompt), "outdated")
            return False
        row.state, row.version, row.reward = "delivered", version, reward
        group = self.live(row.prompt)
        if sum(other.state == "delivered" for other in group) == self.group_size:
            ordered = sorted(group, key=lambda other: other.member)
            if judge(tuple(other.reward for other in ordered)):
                self.filtered.add(row.prompt)
                self.drop(group, "filtered")
            else:
                for other in group:
                    other.state = "buffered"
        return True

    def fail(self, sample: int, owner: str, poison: bool) -> bool:
        row = self.rows.get(sample)
        if row is None or row.owner != owner or row.state != "leased":
            return False
        self.drop([row], "failed")
        self.failures[row.prompt, row.member] += 1
        if poison or self.failures[row.prompt, row.member] >= self.max_failures:
            self.drop(self.live(row.prompt), "failed")
            self.set_aside.add(row.prompt)
        return True

    def dispatch(self, batch: Any) -> None:
        assert batch.step == self.next_step
        waiting = sorted(min(row.version for row in rows) for rows in self.groups("buffered").values())
        given = []
        for group in batch.groups:
            rows = [self.rows[sample] for sample in group.samples]
            assert [row.member for row in rows] == list(range(self.group_size))
            assert all(row.state == "buffered" for row in rows)
            assert tuple(row.version for row in rows) == group.versions
            assert all(0 <= batch.step - row.version <= self.max_staleness for row in rows)
            given.append(min(group.versions))
            for row in rows:
                row.state, row.step = "dispatched", batch.step
        assert sorted(given) == waiting[: len(given)], "the oldest groups go first"
        self.next_step += 1
        self.drop_outdated()

    def groups(self, state: str) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = {}
        for row in self.rows.values():
            if row.state == state:
                found.setdefault(row.prompt, []).append(row)
        return found

    def drop_outdated(self) -> None:
        for prompt in {row.prompt for row in self.rows.values() if row.state in ("delivered", "buffered")}:
            rows = self.live(prompt)
            if min(row.version for row in rows if row.version >= 0) < self.next_step - self.max_staleness:
                self.drop(rows, "outdated")

    def acknowledge(self, step: int, missing: set[int]) -> None:
        for row in self.rows.values():
            if row.state == "dispatched" and row.step == step:
                row.state = "dropped lost" if row.prompt in missing else "trained"
        self.version = step + 1

    def start_trainer(self, step: int) -> None:
        keep_due = step == self.version
        for row in self.rows.values():
            if row.state in ("dispatched", "trained") and row.step >= step + keep_due:
                row.state = "dropped lost"
        for prompt in {row.prompt for row in self.rows.values() if row.state in ("delivered", "buffered")}:
            rows = self.live(prompt)
            if max(row.version for row in rows) > step:
                self.drop(rows, "outdated")
        due_given = any(row.state == "dispatched" for row in self.rows.values())
        self.version = step
        self.next_step = step + 1 if due_given else step
        self.checkpoints = [saved for saved in self.checkpoints if saved <= step]

    def counts(self) -> Counter[str]:
        return Counter(row.state for row in self.rows.values())


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.integers(1, 3),
        size=st.integers(1, 3),
        staleness=st.integers(0, 2),
        steps=st.sampled_from([None, 4, 8]),
        prompts=st.sampled_from([None, 7, 12]),
        picky=st.booleans(),
        wait_s=st.sampled_from([0.0, 0.05, 60.0]),
    )
    def start(self, groups, size, staleness, steps, prompts, picky, wait_s):
        if steps is None and prompts is None:
            steps = 8
        self.settings = PipelineSettings(
            name="p",
            steps=steps,
            prompt_limit=prompts,
            groups_per_step=groups,
            group_size=size,
            max_staleness=staleness,
            max_failures=2,
            max_filtered_per_step=2,
            straggler_wait_s=wait_s,
        )
        self.judge = (
            (lambda rewards, lengths: "dull" if max(rewards) == 0 else None)
            if picky
            else (lambda rewards, lengths: None)
        )
        self.control = PipelineControl(self.settings, self.judge)
        self.model = Naive(size, staleness, 2)
        self.journal: list[tuple[bytes, float]] = []
        self.now, self.joined, self.requests = 0.0, 0, Counter()
        self.trainer, self.filtered_since = "", 0
        self.send(events.SettingsTaken(self.settings))
        self.start_trainer_at(0)
        self.join()

    def send(self, event: Any) -> Any:
        self.now += 0.01
        revision, before = self.control.revision, self.control.snapshot()
        sent = self.control.handle(event, self.now)
        if self.control.revision == revision:
            assert self.control.snapshot() == before
        else:
            self.journal.append((msgspec.msgpack.encode(event, enc_hook=encode_section), self.now))
        return sent[0] if sent else None

    @property
    def workers(self) -> list[str]:
        return [member.member for member in self.control.members.having("rollout")]

    def judged(self, rewards: tuple[float, ...]) -> bool:
        """The filter takes at most two groups between two batches."""
        if self.judge(rewards, ()) is None or self.filtered_since >= 2:
            return False
        self.filtered_since += 1
        return True

    # -- members ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < 3)
    @rule()
    def join(self):
        self.joined += 1
        self.send(messages.Register(P, f"w{self.joined}", "rollout"))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), died=st.booleans())
    def leave(self, data, died):
        worker = data.draw(st.sampled_from(self.workers))
        self.send(messages.Unregister(P, worker, died=died))
        self.model.drop(
            [row for row in self.model.rows.values() if row.owner == worker and row.state == "leased"], "lost"
        )

    def start_trainer_at(self, step: int) -> None:
        self.joined += 1
        self.trainer = f"t{self.joined}"
        assert isinstance(self.send(messages.Register(P, self.trainer, "trainer", step=step)), messages.Registered)
        self.model.start_trainer(step)
        manifest = Manifest(step, self.trainer, f"{self.trainer}/{step}", (), "")
        assert isinstance(self.send(messages.PublishWeights(P, self.trainer, manifest)), messages.Ok)

    @precondition(lambda self: self.control.phase != "complete")
    @rule(data=st.data())
    def restart_trainer(self, data):
        self.start_trainer_at(data.draw(st.integers(self.model.checkpoints[0], self.model.version)))

    @precondition(lambda self: self.control.phase != "complete")
    @rule(groups=st.integers(1, 3), staleness=st.integers(0, 3), more=st.integers(0, 1))
    def resume(self, groups, staleness, more):
        """Perhaps with other settings; a replay begins with the latest."""
        self.send(events.RunResumed())
        steps = self.settings.steps and self.settings.steps + more
        changes = {"groups_per_step": groups, "max_staleness": staleness, "steps": steps}
        self.settings = self.settings.model_copy(update=changes)
        assert isinstance(self.send(events.SettingsTaken(self.settings)), messages.Ok)
        self.model.max_staleness = staleness
        for row in self.model.rows.values():
            if row.state in LIVE:
                row.state = "dropped lost"
        self.model.next_step = self.model.version
        self.start_trainer_at(self.model.checkpoints[-1])
        self.join()

    # -- samples ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), samples=st.integers(1, 12), behind=st.integers(0, 2), call=st.integers(0, 12))
    def ask(self, data, samples, behind, call):
        worker = data.draw(st.sampled_from(self.workers))
        version = max(0, self.control.newest - behind)
        asked = messages.AskLease(P, worker, self.requests[worker], samples, version, call=call)
        answer = self.send(asked)
        if getattr(answer, "verdict", "") == "granted":
            self.requests[worker] += 1
            for lease in answer.leases:
                self.model.lease(lease, worker)
                assert lease.min_version <= version
            assert sum(len(lease.samples) for lease in answer.leases) <= samples
            assert self.send(asked).leases == answer.leases
        else:
            assert getattr(answer, "verdict", "granted") != "granted"
            assert (answer.verdict == "exhausted") == (self.control.phase == "complete")

    def rollout(self, sample: int, version: int, reward: float) -> Rollout:
        digest = self.control.state.published.valid.get(version, "")
        return Rollout(sample, version, digest, reward, 1, PayloadRef("r", 0, sample, 0, 1, 0))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), count=st.integers(1, 6), shift=st.integers(-2, 1), reward=st.sampled_from([0.0, 1.0]))
    def deliver(self, data, count, shift, reward):
        worker = data.draw(st.sampled_from(self.workers))
        mine = [row.sample for row in self.model.rows.values() if row.owner == worker and row.state == "leased"]
        strange = [row.sample for row in self.model.rows.values() if row.owner != worker or row.state != "leased"]
        samples = mine[:count] + strange[-1:]
        version = max(0, self.control.newest + shift)
        rollouts = tuple(self.rollout(sample, version, reward) for sample in samples)
        answer = self.send(messages.Deliver(P, worker, rollouts))
        assert isinstance(answer, messages.Delivered)
        newest = self.control.newest
        taken = [self.model.deliver(sample, worker, version, reward, newest, self.judged) for sample in samples]
        assert answer.refused == tuple(sample for sample, ok in zip(samples, taken, strict=True) if not ok)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), poison=st.booleans(), give_back=st.booleans())
    def fail(self, data, poison, give_back):
        worker = data.draw(st.sampled_from(self.workers))
        rows = [row.sample for row in self.model.rows.values() if row.owner == worker][-3:]
        if not rows:
            return
        sample = data.draw(st.sampled_from(rows))
        if give_back:
            answer = self.send(messages.Deliver(P, worker, returned=(sample,)))
            row = self.model.rows[sample]
            taken = row.state == "leased"
            if taken:
                self.model.drop([row], "returned")
        else:
            answer = self.send(
                messages.Deliver(P, worker, failures=(FailedRollout(sample, "generate", "boom", poison),))
            )
            taken = self.model.fail(sample, worker, poison)
        assert answer.refused == (() if taken else (sample,))

    # -- steps --------------------------------------------------------------------------------------------------

    @rule(ahead=st.booleans())
    def ask_batch(self, ahead):
        step = self.model.version + ahead
        given = any(row.state == "dispatched" and row.step == step for row in self.model.rows.values())
        late, since = self.stragglers(), self.control.state.batch_ready_at
        answer = self.send(messages.AskBatch(P, self.trainer, step))
        if isinstance(answer, messages.BatchReady) and not given and answer.batch.groups:
            self.filtered_since = 0
            if late and (wait_s := self.settings.straggler_wait_s):
                assert since is not None
                assert self.now - since >= wait_s, "a group was outdated that could still have been waited for"
                for prompt in late:
                    self.model.drop(self.model.live(prompt), "outdated")
            self.model.dispatch(answer.batch)
            assert self.send(messages.AskBatch(P, self.trainer, step)) == answer
            short = len(answer.batch.groups) < self.settings.groups_per_step
            assert not short or answer.batch.final
        elif isinstance(answer, messages.NotYet):
            ready = len(self.model.groups("buffered"))
            due = step == self.model.next_step
            assert not due or ready < self.settings.groups_per_step or (late and self.settings.straggler_wait_s)

    def stragglers(self) -> list[int]:
        """Open groups that the next batch would outdate, if all missing members are with workers that are awaited."""
        found = []
        for prompt in self.model.groups("leased"):
            group = self.control.ledger.state.groups[prompt]
            rows = self.model.live(prompt)
            owners = {row.owner for row in rows if row.state == "leased"}
            awaited = not owners & self.control.state.not_awaited.keys() and len(rows) == self.model.group_size
            if awaited and group.promised <= self.model.next_step - self.model.max_staleness:
                found.append(prompt)
        return found

    @precondition(lambda self: self.model.version < self.model.next_step)
    @rule(data=st.data())
    def acknowledge(self, data):
        step = self.model.version
        prompts = sorted(
            {row.prompt for row in self.model.rows.values() if row.step == step and row.state == "dispatched"}
        )
        missing = data.draw(st.sets(st.sampled_from(prompts)) if prompts else st.just(set()))
        version = messages.PublishWeights(P, self.trainer, Manifest(step + 1, "", f"{self.trainer}/{step + 1}", (), ""))
        self.send(version)
        acked = messages.AckStep(P, self.trainer, step, tuple(sorted(missing)))
        assert self.send(acked) == messages.Ok()
        self.model.acknowledge(step, missing)
        assert self.send(acked) == messages.Ok()

    @rule(keep=st.integers(1, 3))
    def checkpoint(self, keep):
        step = self.model.version
        saved = [*self.model.checkpoints, step] if step > self.model.checkpoints[-1] else self.model.checkpoints
        self.model.checkpoints = saved[-keep:]
        saved = messages.AckCheckpoint(P, self.trainer, step, self.model.checkpoints[0])
        assert self.send(saved) == messages.Ok()

    # -- always -------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "model"):
            return
        self.control.check()
        books, rows = self.control.ledger.state, self.model.counts()
        for state in (*LIVE, "trained"):
            assert books.counts[state] == rows[state], state
        for reason, count in books.dropped.items():
            assert count == rows[f"dropped {reason}"], reason
        assert (books.version, books.next_step) == (self.model.version, self.model.next_step)
        assert set(books.set_aside) == self.model.set_aside
        assert books.filtered_prompts == len(self.model.filtered)

    @invariant()
    def no_prompt_is_trained_twice_or_skipped(self):
        if not hasattr(self, "model"):
            return
        trained = [row for row in self.model.rows.values() if row.state == "trained"]
        assert len({(row.prompt, row.member) for row in trained}) == len(trained)
        books = self.control.ledger.state
        done = {row.prompt for row in trained} | self.model.set_aside | self.model.filtered
        waiting = {row.prompt for row in self.model.rows.values() if row.state in LIVE} | set(books.redo)
        waiting |= set(books.awaiting)
        assert done | waiting == set(range(books.next_prompt))
        assert not done & waiting

    def teardown(self):
        if not hasattr(self, "model"):
            return
        replayed = PipelineControl(self.settings, self.judge)
        decode = msgspec.msgpack.Decoder(events.Event, dec_hook=decode_section).decode
        for event, at in self.journal:
            replayed.handle(decode(event), at)
        assert replayed.snapshot() == self.control.snapshot()
        self.control.restore(self.control.snapshot())
        self.finish()

    def finish(self) -> None:
        """Whatever happened: one worker and one trainer without faults bring the run to its end."""
        if not self.workers:
            self.join()
        for worker in self.workers[1:]:
            self.send(messages.Unregister(P, worker))
        worker = self.workers[0]
        for _ in range(500):
            held = list(self.control.ledger.state.leases.get(worker, ()))
            rollouts = tuple(self.rollout(sample, self.control.newest, 1.0) for sample in held)
            self.send(messages.Deliver(P, worker, rollouts))
            step = self.control.ledger.state.version
            answer = self.send(messages.AskBatch(P, self.trainer, step))
            if isinstance(answer, messages.Complete):
                self.send(messages.AckCheckpoint(P, self.trainer, step))
                assert self.control.phase == "complete"
                self.control.check()
                return
            if isinstance(answer, messages.BatchReady):
                self.send(messages.PublishWeights(P, self.trainer, Manifest(step + 1, "", f"end/{step + 1}", (), "")))
                self.send(messages.AckStep(P, self.trainer, step))
            asked = messages.AskLease(P, worker, self.requests[worker], 4, self.control.newest)
            self.requests[worker] += getattr(self.send(asked), "verdict", "") == "granted"
        raise AssertionError(f"never completed: {self.control.diagnose(self.now)}")


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
