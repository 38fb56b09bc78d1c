"""A simulated worker's generation loop: does what the real prefetch machine decides, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from penstock.errors import InvalidTransition
from penstock.payload.unread import Unread
from penstock.records.ids import MemberId, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout, Score
from penstock.rollout import flow
from penstock.rollout.prefetch import Bounds, Prefetch
from penstock.sim.actors import LONG_POLL_S, Pace
from penstock.sim.engine import Body, Call, Engine, Owner, Signal, Sleep, Until
from penstock.sim.faults import FaultLog, WholeFaults
from penstock.sim.front_desk import LeaseReply
from penstock.sim.replica import SimEngine
from penstock.sim.rings import SimRing
from penstock.sim.scoring import scores
from penstock.wire import messages

SEGMENTS = 3
"""Decode boundaries at which a generating batch looks at the weights it is made with."""
WRITE_S = 120.0
"""How long a full ring may hold up postprocessing before the sample fails."""
DRAIN_S = 10.0
RETURN_S = 10.0


class Work(msgspec.Struct):
    """What is kept of one lease."""

    lease: PromptLease
    made: list[tuple[Version, str]] = []
    """The weights it was generated with, at each decode boundary."""
    rollouts: list[Rollout] = []
    failures: list[FailedRollout] = []
    scores: list[Score] = []

    def fail(self, hook: str, error: str, *, poison: bool = False) -> None:
        self.failures = [FailedRollout(sample, hook, error, poison) for sample in self.lease.samples]


class SimRunner:
    """One run of the loop: from being routed to until the prompts are exhausted, or it is stopped."""

    def __init__(
        self,
        sim: Engine,
        owner: Owner,
        member: MemberId,
        engine: SimEngine,
        ring: SimRing,
        unread: Unread,
        random: Random,
        faults: FaultLog,
        settings: WholeFaults,
        pace: Pace,
        bounds: Bounds,
        *,
        prefetch: bool,
        slow: float,
        first_request: int,
        witness: Callable[[SimEngine], None],
        refused: Callable[[str], None],
    ) -> None:
        """`witness` sees the engine at every decode boundary; `refused` ends the process: the controller gave it up."""
        self.machine = Prefetch(bounds, prefetch=prefetch)
        self.works: dict[flow.Ticket, Work] = {}
        self.request = first_request
        self.finished: str | None = None
        self.ended = Signal()
        self.busy_s = 0.0
        self._sim = sim
        self._owner = owner
        self._member = member
        self._engine = engine
        self._ring = ring
        self._unread = unread
        self._random = random
        self._faults = faults
        self._settings = settings
        self._pace = pace
        self._slow = slow
        self._witness = witness
        self._refused = refused
        self._asking: object | None = None
        self._abandoned = False
        self._post(flow.Started())

    def stop(self, reason: str, drain_s: float = DRAIN_S) -> None:
        """The engine's samples are finished, within bounds; waiting leases go back at once."""
        if self.finished is None:
            self._sim.after(drain_s, self._give_up, reason)
            self._post(flow.StopAsked(reason))

    def abandon(self, reason: str) -> None:
        """Every lease goes back, also those being generated."""
        if self.finished is None and not self._abandoned:
            self._abandoned = True
            self._sim.after(RETURN_S, self._finish, reason)
            self._sim.fire(self._engine.awoken)  # those who wait to decode go on no more
            self._post(flow.Abandoned(reason))

    def flip(self) -> None:
        self._post(flow.PrefetchSet(not self.machine.prefetch))

    # -- the machine --------------------------------------------------------------------------------------------

    def _post(self, *news: flow.Event) -> None:
        for event in news:
            if self.finished is not None:
                return
            machine, now = self.machine, self._sim.now
            first = machine.held.next_ticket
            decided = machine.handle(event, now)
            machine.check()
            for ticket in range(first, machine.held.next_ticket):
                if ticket in machine.held:
                    self.works[ticket] = Work(machine.held[ticket].lease)
            for effect in decided:
                self._act(effect)
            if machine.ending is not None and self._asking is not None and self.finished is None:
                self._asking = None  # a cancelled ask is an answer too; what it brings is given back
                self._post(flow.LeaseAnswered((), "throttled"))

    def _act(self, effect: flow.Effect) -> None:
        match effect:
            case flow.AskLease(samples, after_s):
                self._asking = object()
                self._spawn(self._ask(samples, after_s, self._asking))
            case flow.Prepare(tickets):
                self._spawn(self._prepare(tickets))
            case flow.Generate(batch, tickets):
                self._spawn(self._generate(batch, tickets))
            case flow.Postprocess(tickets):
                self._spawn(self._postprocess(tickets))
            case flow.Deliver(tickets):
                self._spawn(self._deliver(tickets))
            case flow.ReturnLeases(tickets, samples):
                for ticket in tickets:
                    self._drop(self.works.pop(ticket))
                self._spawn(self._return(samples))
            case flow.Finish(reason):
                self._finish(reason)

    def _finish(self, reason: str) -> None:
        if self.finished is None:
            self.finished = reason
            self._sim.fire(self.ended)

    def _give_up(self, reason: str) -> None:
        if self._owner.alive:
            self.abandon(reason)

    def _spawn(self, body: Body) -> None:
        self._sim.spawn(self._owner, body)

    def _drop(self, work: Work) -> None:
        """Its samples will not be reported: their payloads are nobody's."""
        self._ring.discard(rollout.payload for rollout in work.rollouts)
        work.rollouts = []

    # -- the desk -----------------------------------------------------------------------------------------------

    def _ask(self, samples: int, after_s: float, token: object) -> Body:
        yield Sleep(after_s)
        asked = self._sim.now
        self.request += 1
        reply = yield Call(
            messages.AskLease(self._owner.pipeline, self._member, self.request, samples, self._engine.version),
            LONG_POLL_S,
        )
        if not isinstance(reply, LeaseReply):
            self._refused(str(reply))
            return
        self._ring.discard((*reply.discard, *self._unread.expire(reply.oldest, self._sim.now)))
        verdict = reply.verdict
        leases = verdict.leases
        if self._asking is not token:
            if leases:
                yield from self._give_back(tuple(sample for lease in leases for sample in lease.samples))
            return
        self._asking = None
        said = verdict.verdict
        self._post(flow.LeaseAnswered(leases, said, self._sim.now - asked))
        if verdict.phase in ("complete", "stopped"):
            self.abandon(f"the run is {verdict.phase}")

    def _deliver(self, tickets: tuple[flow.Ticket, ...]) -> Body:
        works = [self.works[ticket] for ticket in tickets]
        rollouts = [rollout for work in works for rollout in work.rollouts]
        failures = [failure for work in works for failure in work.failures]
        counted = tuple(score for work in works for score in work.scores)
        answer = yield Call(
            messages.Deliver(self._owner.pipeline, self._member, tuple(rollouts), tuple(failures), scores=counted)
        )
        if not isinstance(answer, messages.Delivered):
            self._refused(str(answer))
            return
        refused = set(answer.refused)
        self._ring.discard(rollout.payload for rollout in rollouts if rollout.sample in refused)
        for rollout in rollouts:
            if rollout.sample not in refused:
                self._unread.delivered(rollout.version, rollout.payload)
        for ticket in tickets:
            del self.works[ticket]
        self._post(flow.DeliverEnded())

    def _return(self, samples: tuple[SampleId, ...]) -> Body:
        yield from self._give_back(samples)
        self._post(flow.ReturnEnded())

    def _give_back(self, samples: tuple[SampleId, ...]) -> Body:
        answer = yield Call(messages.Deliver(self._owner.pipeline, self._member, returned=samples))
        if not isinstance(answer, messages.Delivered):
            self._refused(str(answer))

    # -- the hooks ----------------------------------------------------------------------------------------------

    def _prepare(self, tickets: tuple[flow.Ticket, ...]) -> Body:
        for ticket in tickets:
            yield Sleep(0.01 * self._slow)
            work = self.works.get(ticket)
            if work is None:
                continue
            poisoned = self._settings.poisoned(work.lease.prompt)
            if poisoned or self._strikes("prepare raised", self._settings.hook_fails):
                work.fail("prepare", "simulated", poison=poisoned)
                self._post(flow.PrepareEnded(ticket, failed=True))
            else:
                self._post(flow.PrepareEnded(ticket, 1000 * len(work.lease.samples)))

    def _generate(self, batch: int, tickets: tuple[flow.Ticket, ...]) -> Body:
        works = [self.works[ticket] for ticket in tickets]
        pace, engine = self._pace, self._engine
        length_s = pace.generate_s * self._slow
        length_s *= self._random.lognormvariate(-(pace.generate_spread**2) / 2, pace.generate_spread)
        seen: list[tuple[Version, str]] = []
        for _ in range(SEGMENTS):
            while engine.asleep and not self._abandoned:
                yield Until(engine.awoken)
            if self._abandoned:
                return
            self._witness(engine)
            seen.append((engine.version, engine.digest))
            yield Sleep(length_s / SEGMENTS)
        self.busy_s += length_s * sum(len(work.lease.samples) for work in works)
        if self._strikes("generate raised", self._settings.hook_fails):
            if len(works) == 1:
                works[0].fail("generate", "simulated")
            self._post(flow.GenerateEnded(batch, failed=True))
            return
        for work in works:
            work.made = [*seen, (engine.version, engine.digest)]
        self._post(flow.GenerateEnded(batch, tuple(2000 * len(work.lease.samples) for work in works)))

    def _postprocess(self, tickets: tuple[flow.Ticket, ...]) -> Body:
        for ticket in tickets:
            work = self.works.get(ticket)
            if work is None:
                continue
            if self._strikes("postprocess raised", self._settings.hook_fails):
                work.fail("postprocess", "simulated")
            else:
                yield from self._keep(work)
            if ticket not in self.works:  # given back while it was being written
                self._drop(work)
            self._post(flow.PostprocessEnded(ticket))

    def _keep(self, work: Work) -> Body:
        """Writes each sample's payload and notes what is to be reported."""
        if not work.made:
            raise InvalidTransition(f"{work} is postprocessed and was never generated")
        version, digest = min(work.made)
        for sample in work.lease.samples:
            if self._strikes("sample failed", self._settings.sample_fails):
                work.failures.append(FailedRollout(sample, "postprocess", "simulated failure"))
                continue
            if work.lease.evaluation is not None:
                work.scores += scores(work.lease, [sample], work.made)
                continue
            size_bytes = self._random.choice((700, 3000, 9000))
            slot, waited_s = self._ring.begin(size_bytes), 0.0
            self._ring.waits += slot is None
            while slot is None and waited_s < WRITE_S:
                yield Sleep(0.5)
                waited_s += 0.5
                slot = self._ring.begin(size_bytes)
            if slot is None:
                self._drop(work)
                work.fail("postprocess", "the ring had no room")
                return
            yield Sleep(0.002)
            payload = self._ring.commit(slot, sample, size_bytes)
            work.rollouts.append(Rollout(sample, version, digest, self._random.random(), 1, payload))

    def _strikes(self, what: str, probability: float) -> bool:
        return self._faults.strikes(what, probability, self._sim.now)
