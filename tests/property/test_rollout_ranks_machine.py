"""A leader and its ranks, with every interleaving of grants, refusals, flips, failures and orders to stop."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout import cadence, flow, lead
from penstock.rollout.cadence import Cadence
from penstock.rollout.flow import Stage
from penstock.rollout.lead import Lead
from profiles import examples

GROUP = 2


class FakeRank:
    """Does at once what its cadence says, and remembers it."""

    def __init__(self, rank: int, ranks: int, share: bool) -> None:
        self.machine = Cadence(rank=rank, ranks=ranks, share=share)
        self.generated: list[int] = []
        self.did: list[str] = []
        self.slow: list[flow.Ticket] = []
        """Being post-processed."""

    def meet(self, command: cadence.CommandReceived, fails: set[int]) -> cadence.Drop | None:
        """Acts on what was heard, with the hooks failing for some prompts."""
        dropped: cadence.Drop | None = None
        effects = deque(self.machine.handle(command, 0.0))
        while effects:
            effect = effects.popleft()
            self.did.append(type(effect).__name__)
            more: list[cadence.Effect] = []
            match effect:
                case cadence.AwaitPrepared(batch, tickets):
                    for ticket in tickets:
                        held = self.machine.held[ticket]
                        if held.stage is Stage.PREPARING:
                            failed = held.lease.prompt in fails and held.lease.prompt % 2 == 0
                            self.machine.handle(flow.PrepareEnded(ticket, 10, failed), 0.0)
                    more = self.machine.handle(cadence.BatchPrepared(batch), 0.0)
                case flow.Generate(batch, tickets):
                    prompts = [self.machine.held[ticket].lease.prompt for ticket in tickets]
                    failed = any(prompt in fails and prompt % 2 == 1 for prompt in prompts)
                    if not failed:
                        self.generated += prompts
                    more = self.machine.handle(flow.GenerateEnded(batch, failed=failed), 0.0)
                case flow.Postprocess(tickets):
                    assert not self.slow, "one batch at a time"
                    self.slow += tickets
                case cadence.AwaitPostprocessed(tickets):
                    waited_for = self.machine.held.at(Stage.POSTPROCESSING) if tickets is None else tickets
                    assert set(waited_for) <= set(self.slow), "no rank waits for what was not begun"
                    self.settle()
                case cadence.Drop():
                    dropped = effect
            effects.extendleft(reversed(more))
        return dropped

    def settle(self) -> None:
        for ticket in self.slow:
            self.machine.handle(flow.PostprocessEnded(ticket), 0.0)
        self.slow.clear()

    def tell(self) -> tuple[SampleId, ...]:
        finished = [held.lease for held in self.machine.held.at(Stage.FINISHED).values()]
        self.machine.handle(cadence.ResultsSent(), 0.0)
        return tuple(sample for lease in finished for sample in lease.samples)


class RanksMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 3), share=st.booleans(), prefetch=st.booleans())
    def begin(self, ranks: int, share: bool, prefetch: bool) -> None:
        self.lead = Lead(2 * GROUP, prefetch=prefetch)
        self.ranks = [FakeRank(rank, ranks, share) for rank in range(ranks)]
        self.share = share
        self.prompts = 0
        self.asked: list[int] = []
        self.answers = 0
        self.delivered: Counter[SampleId] = Counter()
        self.given_back: Counter[SampleId] = Counter()
        self.finished: list[str] = []
        self.fails: set[int] = set()
        self.decide(lead.WorkBegan())

    def decide(self, event: lead.Event) -> lead.Command | None:
        command = None
        for effect in self.lead.handle(event, 0.0):
            match effect:
                case lead.Command():
                    command = effect
                case flow.AskLease(samples):
                    self.asked.append(samples)
                case lead.Deliver(samples):
                    self.delivered.update(samples)
                    self.answers += 1
                case lead.Discard(samples):
                    assert not samples & set(self.lead.outstanding)
                case lead.ReturnSamples(samples):
                    self.given_back.update(samples)
                    self.answers += 1
                case flow.Finish(reason):
                    self.finished.append(reason)
        return command

    @precondition(lambda self: self.asked)
    @rule(verdict=st.sampled_from(["granted", "throttled", "exhausted"]), count=st.integers(1, 4), bad=st.booleans())
    def answer(self, verdict: flow.Verdict, count: int, bad: bool) -> None:
        self.answer_with(verdict, count, bad)

    def answer_with(self, verdict: flow.Verdict, count: int, bad: bool) -> None:
        self.asked.pop()
        leases = []
        for _ in range(count if verdict == "granted" else 0):
            samples = tuple(SampleId(GROUP * self.prompts + member) for member in range(GROUP))
            leases.append(PromptLease(PromptIndex(self.prompts), 0, samples, tuple(range(GROUP)), Version(0)))
            if bad and self.share:
                self.fails.add(self.prompts)
            self.prompts += 1
        self.decide(flow.LeaseAnswered(tuple(leases), verdict))

    @rule(settled=st.booleans())
    def fetch_in_peace(self, settled: bool) -> None:
        self.fetch(settled, stopped_meanwhile=False)

    @precondition(lambda self: self.asked)
    @rule(count=st.integers(1, 3), settled=st.booleans())
    def round(self, count: int, settled: bool) -> None:
        self.answer_with("granted", count, bad=False)
        self.fetch(settled, stopped_meanwhile=False)

    @rule(settled=st.booleans())
    def fetch_while_stopping(self, settled: bool) -> None:
        self.fetch(settled, stopped_meanwhile=True)

    def fetch(self, settled: bool, stopped_meanwhile: bool) -> None:
        """All ranks meet; a stop may come between rank 0's order and its effect."""
        self.decide(lead.FetchDue())
        if settled:
            for rank in self.ranks:
                rank.settle()
        command = self.decide(lead.CommandRequested())
        assert command is not None
        assert command.order == "work" or not command.leases
        outcomes = tuple(sample for rank in self.ranks for sample in rank.tell())
        paused = all(rank.machine.paused for rank in self.ranks)
        if stopped_meanwhile:
            self.decide(flow.StopRequested("meanwhile"))
        self.decide(lead.OutcomesReceived(outcomes))
        if paused:
            self.decide(lead.RanksPaused())
        received = cadence.CommandReceived(command.order, command.leases, command.prefetch)
        drops = [rank.meet(received, self.fails) for rank in self.ranks]
        assert len({drop.samples if drop is not None else None for drop in drops}) == 1, "ranks drop alike"
        if drops[0] is not None:
            self.decide(lead.Dropped(drops[0].samples))

    @rule()
    def desk_answers(self) -> None:
        while self.answers:
            self.answers -= 1
            self.decide(lead.ControllerAnswered())

    @rule(on=st.booleans())
    def flip(self, on: bool) -> None:
        self.decide(flow.PrefetchSet(on))

    @precondition(lambda self: self.lead.working)
    @rule(at_once=st.booleans())
    def stop(self, at_once: bool) -> None:
        self.decide(flow.Abandoned("now") if at_once else flow.StopRequested("stop"))
        assert not at_once or not self.lead.outstanding, "everything goes back at once"

    @precondition(lambda self: not self.lead.working)
    @rule()
    def work_again(self) -> None:
        self.decide(lead.WorkBegan())

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "lead"):
            return
        self.lead.check()
        for rank in self.ranks:
            rank.machine.check()
        assert not [sample for sample, count in (self.delivered + self.given_back).items() if count > 1]
        known = len(self.delivered) + len(self.given_back) + len(self.lead.outstanding)
        assert known == GROUP * self.prompts
        if not self.lead.working:
            assert not self.lead.outstanding
            assert not self.asked

    @invariant()
    def ranks_do_the_same(self) -> None:
        if not hasattr(self, "lead") or self.share:
            return
        for rank in self.ranks[1:]:
            assert rank.generated == self.ranks[0].generated

    @invariant()
    def work_is_in_order(self) -> None:
        if hasattr(self, "lead") and not self.fails:
            for rank in self.ranks:
                assert rank.generated == sorted(rank.generated)

    def teardown(self) -> None:
        """From every state a stop leads to the end within a few fetches."""
        if not hasattr(self, "lead") or not self.lead.working:
            return
        self.decide(flow.StopRequested("the test is over"))
        if self.asked:
            self.asked.clear()
            self.decide(flow.LeaseAnswered((), "throttled"))
        for _ in range(3):
            self.fetch(settled=False, stopped_meanwhile=False)
            self.desk_answers()
        assert not self.lead.working, self.lead


TestRanks = RanksMachine.TestCase
TestRanks.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
