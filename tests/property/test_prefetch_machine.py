"""The prefetch machine under any order of events: nothing lost, nothing doubled, order and bounds kept, always live."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout import flow
from penstock.rollout.pacing import LONGEST_PAUSE_S
from penstock.rollout.prefetch import Bounds, Prefetch
from profiles import examples


class PrefetchUnderAnyOrder(RuleBasedStateMachine):
    """Plays controller, hooks and operator; every effect becomes an outstanding obligation that may end at any time."""

    @initialize(
        batch=st.integers(1, 6),
        queue=st.integers(1, 12),
        output=st.one_of(st.none(), st.integers(1, 16)),
        scoring=st.integers(1, 12),
        queue_bytes=st.integers(1, 40),
        concurrency=st.integers(1, 3),
        preparations=st.integers(1, 3),
        prefetch=st.booleans(),
        events_before_the_end=st.integers(0, 30),
    )
    def begin(
        self, batch, queue, output, scoring, queue_bytes, concurrency, preparations, prefetch, events_before_the_end
    ):
        self.bounds = Bounds(
            batch_samples=batch,
            queue_samples=queue,
            output_samples=output,
            scoring_samples=scoring,
            queue_bytes=queue_bytes,
            concurrency=concurrency,
            preparations=preparations,
        )
        self.machine = Prefetch(self.bounds, prefetch=prefetch)
        self.now = 0.0
        self.events = 0
        self.events_before_the_end = events_before_the_end
        """A stop may come at any instant, but if it always came soon, no other rule would have the time to matter."""
        self.asked: flow.AskLease | None = None
        self.preparing: list[int] = []
        self.batches: dict[int, tuple[int, ...]] = {}
        self.postprocessing: list[int] = []
        self.scoring: list[int] = []
        self.delivering: tuple[int, ...] | None = None
        self.returns = 0
        self.samples_of: dict[int, tuple[SampleId, ...]] = {}
        self.next_sample = 0
        self.granted_after_stop = False
        self.left: list[int] = []
        self.generated_first: list[int] = []
        self.retried: set[int] = set()
        self.finish: str | None = None
        self.stopping = self.abandoning = False
        self.largest_lease = 0
        self.tell(flow.Started())

    def tell(self, event: flow.Event) -> None:
        self.now += 0.01
        self.events += 1
        assert self.finish is None
        for effect in self.machine.handle(event, self.now):
            self.do(effect)

    def do(self, effect: flow.Effect) -> None:
        match effect:
            case flow.AskLease(samples, after_s):
                assert self.asked is None
                assert samples >= 1
                assert 0 <= after_s <= LONGEST_PAUSE_S
                assert not self.stopping
                if self.machine.prefetch:
                    assert self.machine.line_samples + samples <= self.bounds.queue_samples
                else:
                    made = self.machine.held_samples - self.machine.held.samples(flow.Stage.DELIVERING)
                    assert made <= (self.bounds.concurrency - 1) * self.bounds.batch_samples
                self.asked = effect
            case flow.Prepare(tickets):
                self.preparing.extend(tickets)
            case flow.Generate(batch, tickets):
                samples = sum(len(self.samples_of[ticket]) for ticket in tickets)
                assert len(tickets) == 1 or samples <= self.bounds.batch_samples
                self.batches[batch] = tickets
                assert len(self.batches) <= self.bounds.concurrency
                self.generated_first.extend(ticket for ticket in tickets if ticket not in self.retried)
                in_output = self.machine.output_samples
                assert in_output <= max(self.bounds.output_bound, samples)
            case flow.Postprocess(tickets):
                assert not self.postprocessing
                self.postprocessing.extend(tickets)
            case flow.Deliver(tickets):
                assert self.delivering is None
                self.delivering = tickets
            case flow.ReturnLeases(tickets, samples):
                assert self.stopping
                expected = [sample for ticket in tickets for sample in self.samples_of[ticket]]
                assert list(samples) == expected
                self.left.extend(tickets)
                self.returns += 1
            case flow.Finish(reason):
                self.finish = reason

    @precondition(lambda self: self.finish is None and self.asked is not None)
    @rule(
        sizes=st.lists(st.integers(1, 4), max_size=5),
        verdict=st.sampled_from(["granted", "throttled", "version_too_old", "exhausted"]),
        waited_s=st.sampled_from([0.0, 10.0]),
    )
    def desk_answers(self, sizes, verdict, waited_s):
        assert self.asked is not None
        room = self.asked.samples
        leases: list[PromptLease] = []
        ticket = self.machine.held.next_ticket
        for size in sizes:
            # A controller never grants more than was asked for.
            if verdict in ("throttled", "version_too_old") or size > room:
                break
            room -= size
            samples = tuple(SampleId(self.next_sample + member) for member in range(size))
            self.next_sample += size
            self.samples_of[ticket] = samples
            leases.append(PromptLease(PromptIndex(ticket), 0, samples, tuple(range(size)), Version(0)))
            ticket += 1
        self.asked = None
        self.tell(flow.LeaseAnswered(tuple(leases), verdict, waited_s))

    @precondition(lambda self: self.finish is None and self.preparing)
    @rule(pick=st.integers(0), size_bytes=st.integers(0, 20), failed=st.booleans())
    def preparation_ends(self, pick, size_bytes, failed):
        ticket = self.preparing.pop(pick % len(self.preparing))
        self.tell(flow.PrepareEnded(ticket, size_bytes, failed))

    @precondition(lambda self: self.finish is None and self.batches)
    @rule(pick=st.integers(0), size_bytes=st.integers(0, 20), failed=st.booleans())
    def generation_ends(self, pick, size_bytes, failed):
        batch = sorted(self.batches)[pick % len(self.batches)]
        tickets = self.batches.pop(batch)
        if failed:
            self.retried.update(tickets)
        self.tell(flow.GenerateEnded(batch, () if failed else (size_bytes,) * len(tickets), failed))

    @precondition(lambda self: self.finish is None and self.postprocessing)
    @rule()
    def postprocessing_ends(self):
        self.tell(flow.PostprocessEnded(self.postprocessing.pop(0)))

    @precondition(lambda self: self.finish is None and self.postprocessing)
    @rule()
    def scoring_begins(self):
        self.scoring.append(self.postprocessing.pop(0))
        self.tell(flow.ScoringBegan(self.scoring[-1]))
        assert self.machine.scoring_samples <= max(self.bounds.scoring_samples, self.largest())

    def largest(self) -> int:
        return max(len(samples) for samples in self.samples_of.values())

    @precondition(lambda self: self.finish is None and self.scoring)
    @rule(pick=st.integers(0))
    def scoring_ends(self, pick):
        self.tell(flow.PostprocessEnded(self.scoring.pop(pick % len(self.scoring))))

    @precondition(lambda self: self.finish is None and self.delivering is not None)
    @rule()
    def delivery_ends(self):
        assert self.delivering is not None
        self.left.extend(self.delivering)
        self.delivering = None
        self.tell(flow.DeliverEnded())

    @precondition(lambda self: self.finish is None and self.returns)
    @rule()
    def return_ends(self):
        self.returns -= 1
        self.tell(flow.ReturnEnded())

    @precondition(lambda self: self.finish is None)
    @rule(on=st.booleans())
    def prefetch_is_flipped(self, on):
        self.tell(flow.PrefetchSet(on))

    @precondition(lambda self: self.finish is None and self.events > self.events_before_the_end)
    @rule()
    def stop_is_asked(self):
        self.stopping = True
        self.tell(flow.StopRequested("told to"))
        assert self.machine.line_samples == 0

    @precondition(lambda self: self.finish is None and self.events > self.events_before_the_end)
    @rule()
    def abandoned(self):
        self.stopping = self.abandoning = True
        in_delivery = self.delivering or ()
        self.tell(flow.Abandoned("told to"))
        assert self.machine.held_samples == sum(len(self.samples_of[ticket]) for ticket in in_delivery)

    @precondition(lambda self: self.finish is not None)
    @rule()
    def rest(self):
        """Nothing happens after the end."""

    @invariant()
    def sound(self):
        if not hasattr(self, "machine"):
            return
        self.machine.check()
        assert len(self.left) == len(set(self.left)), "a lease left twice"
        assert self.generated_first == sorted(self.generated_first), "generation overtook the lease order"

    @invariant()
    def live(self):
        """Whatever is held, something is under way that will move it."""
        if not hasattr(self, "machine") or self.finish is not None:
            return
        under_way = self.asked or self.preparing or self.batches or self.postprocessing or self.scoring
        under_way = under_way or self.delivering
        assert under_way or self.returns, f"stuck: {self.machine!r}"

    def teardown(self):
        if not hasattr(self, "machine") or self.finish is not None:
            return
        # From any state a run of good news ends it, with every lease accounted for.
        for _ in range(10_000):
            if self.finish is not None:
                break
            if self.asked is not None:
                self.asked = None
                self.tell(flow.LeaseAnswered((), "exhausted"))
            elif self.preparing:
                self.preparation_ends(0, 1, False)
            elif self.batches:
                self.generation_ends(0, 1, False)
            elif self.postprocessing:
                self.postprocessing_ends()
            elif self.scoring:
                self.scoring_ends(0)
            elif self.delivering is not None:
                self.delivery_ends()
            elif self.returns:
                self.return_ends()
        assert self.finish is not None, f"never finished: {self.machine!r}"
        assert sorted(self.left) == list(range(self.machine.held.next_ticket))
        self.machine.check()


PrefetchUnderAnyOrder.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
TestPrefetchUnderAnyOrder = PrefetchUnderAnyOrder.TestCase
