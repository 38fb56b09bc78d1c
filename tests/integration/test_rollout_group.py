"""A group of ranks as threads of one process, with a scripted controller: failures, flips, stops, abandonment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_rollout_runner import NumberedStore, ScriptedController, ToyWorkload, settings, until

from penstock.errors import PeerLost, PenstockError, RunFailed
from penstock.records.ids import Version
from penstock.records.payload import PayloadRef
from penstock.records.weights import Manifest
from penstock.rollout import trace
from penstock.rollout.io.group import GroupRunner
from penstock.rollout.io.lockstep import Lockstep, RankCallbacks
from penstock.rollout.io.rank_fetch import RankReport
from penstock.runtime.offload import Offload
from penstock.runtime.ranks import RankFailure

RANKS = 2


class Room:
    """Where the ranks meet: what a process group and its store are to real ones."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.reports: list[RankReport] = [RankReport()] * RANKS
        self.words: RankFailure | None = None


class RoomFetch:
    """The fetch of ranks that are threads."""

    ranks = RANKS
    timeout_s = 20.0

    def __init__(self, room: Room, rank: int) -> None:
        self.rank = rank
        self._room = room

    def gather_reports(self, report: RankReport) -> list[RankReport]:
        self._room.reports[self.rank] = report
        try:
            self._room.barrier.wait(20)
            reports = list(self._room.reports)
            self._room.barrier.wait(20)
        except threading.BrokenBarrierError:
            raise self.find_cause() or PeerLost("no rank gave a reason") from None
        return reports

    def fail(self, error: PenstockError) -> None:
        self._room.words = self._room.words or RankFailure.of(error, self.rank)
        self.leave()

    def leave(self) -> None:
        if self._room.words is not None:
            self._room.barrier.abort()

    def find_cause(self) -> PenstockError | None:
        return self._room.words.error() if self._room.words is not None else None


class Group:
    """Two ranks at work."""

    def __init__(
        self, controller: ScriptedController, workloads: list[Any], prefetch: bool, share: bool, **bounds: Any
    ) -> None:
        room = Room()
        self.workloads = workloads
        self.happened: list[tuple[int, str, Any]] = []
        self.traces: list[trace.Trace] = []
        self.runner = GroupRunner(controller, settings(prefetch, **bounds), interrupt=self.interrupt)
        self.ranks = [
            Lockstep(
                workload,
                NumberedStore(),
                RoomFetch(room, rank),  # type: ignore[arg-type]
                leader=self.runner if rank == 0 else None,
                share=share,
                surroundings=self.around(rank),
            )
            for rank, workload in enumerate(workloads)
        ]
        self.threads = Offload(RANKS, "ranks")
        self.stepping: list[Future[None]] = [self.threads.submit(rank.run) for rank in self.ranks]
        loop = asyncio.get_running_loop()
        self.stepping[0].add_done_callback(lambda done: loop.call_soon_threadsafe(self.left, done))

    def left(self, done: Future[None]) -> None:
        if (error := done.exception()) is not None:
            self.runner.broke(error)

    def around(self, rank: int) -> RankCallbacks:
        def note(what: str) -> Callable[..., None]:
            return lambda said=None: self.happened.append((rank, what, said))

        def wait_for_weights(version: Version) -> bool:
            self.happened.append((rank, "weights", version))
            return True

        return RankCallbacks(
            wait_for_weights=wait_for_weights,
            announced=note("announced"),
            discard=note("discard"),
            rest=note("rest"),
            wake=note("wake"),
            traced=self.traces.append,
        )

    def interrupt(self) -> None:
        for workload in self.workloads:
            workload.gate.set()

    def did(self, what: str) -> list[tuple[int, Any]]:
        return [(rank, said) for rank, happened, said in self.happened if happened == what]


@asynccontextmanager
async def group(
    controller: ScriptedController, *workloads: Any, prefetch: bool = True, share: bool = True, **bounds: Any
) -> AsyncIterator[Group]:
    made = Group(controller, list(workloads) or [ToyWorkload(), ToyWorkload()], prefetch, share, **bounds)
    try:
        yield made
        made.runner.end()
        for stepping in made.stepping:
            await asyncio.wait_for(asyncio.wrap_future(stepping), 20)
    finally:
        made.interrupt()
        made.threads.close(5.0)
        made.runner.machine.check()
        for rank in made.ranks:
            rank.cadence.check()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("share", [False, True])
async def test_every_sample_is_delivered_once_in_order(prefetch: bool, share: bool) -> None:
    controller = ScriptedController(20)
    async with group(controller, prefetch=prefetch, share=share) as made:
        assert await made.runner.run() == "the prompts are exhausted"
        assert [rollout.sample for rollout in controller.rollouts] == sorted(controller.settled()) or share
        assert controller.settled() == list(range(40))
        generated = [[prompt for batch in workload.generated for prompt in batch] for workload in made.workloads]
        everything = list(range(20))
        assert generated == ([everything[0::2], everything[1::2]] if share else [everything, everything])
        assert made.did("weights"), "nothing is generated before its weights are there"
        assert all(rollout.times.generate_s >= 0 and rollout.times.waited_s >= 0 for rollout in controller.rollouts)


@pytest.mark.parametrize("hook", ["prepare", "collate", "generate", "postprocess"])
async def test_a_raising_hook_costs_that_prompt_alone_when_work_is_shared(hook: str) -> None:
    controller = ScriptedController(12)
    async with group(controller, ToyWorkload(), ToyWorkload(hook, frozenset({5, 6}))) as made:
        await made.runner.run()
    assert [failure.sample for failure in controller.failures] == [10, 11], "prompt 6 belongs to the rank that is sound"
    assert all(f"{hook} broke on purpose" in failure.error for failure in controller.failures)
    assert controller.settled() == list(range(24))


async def test_prefetch_flips_on_all_ranks_at_once_while_running() -> None:
    controller = ScriptedController(40)
    async with group(controller, prefetch=False) as made:
        controller.prefetch = None

        async def delivering() -> None:
            controller.prefetch = None if len(controller.rollouts) < 16 else len(controller.rollouts) < 40

        controller.delivering = delivering
        await made.runner.run()
        assert controller.settled() == list(range(80))
        for rank in made.ranks:
            branches = rank.cadence.branches
            assert branches["prefetch_on"] == 1
            assert branches["prefetch_off"] == 1
            assert branches["fetch_plain"]
            assert branches["fetch_ahead"]


async def test_a_stop_while_the_line_is_full_returns_it_and_finishes_the_engines() -> None:
    controller = ScriptedController(1000)
    slow = [ToyWorkload(), ToyWorkload()]
    for workload in slow:
        workload.gate.clear()
    async with group(controller, *slow) as made:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(made.runner.run())
            await until(lambda: all(workload.entered.is_set() for workload in slow) and not made.runner.machine.asking)
            made.runner.stop("told to")
            await until(lambda: controller.returned)  # what waits for the next fetch goes back at once
            made.interrupt()
        assert running.result() == "told to"
        assert controller.settled() == list(range(2 * controller.issued))
        assert len(controller.rollouts) == 4, "the batch in the engines was finished"
        assert {rank for rank, _ in made.did("rest")} == {0, 1}


async def test_abandoning_gives_everything_back_at_once_and_drops_what_comes_late() -> None:
    controller = ScriptedController(1000)
    stuck = [ToyWorkload(), ToyWorkload()]
    for workload in stuck:
        workload.gate.clear()
    async with group(controller, *stuck) as made:
        made.runner._interrupt = lambda: None
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(made.runner.run())
            await until(lambda: all(workload.entered.is_set() for workload in stuck))
            made.runner.abandon("no time")
            await until(lambda: controller.returned and len(controller.returned) == 2 * controller.issued)
            made.interrupt()  # and the engines come back only now
        assert running.result() == "no time"
        assert not controller.rollouts
        assert made.runner.statistics()["branch_late_news"] == 4
        for rank in range(RANKS):  # their payloads have no owner
            await until(lambda rank=rank: sum(len(refs) for one, refs in made.did("discard") if one == rank) == 4)


async def test_ranks_that_do_not_come_to_rest_are_given_up() -> None:
    controller = ScriptedController(1000)
    stuck = [ToyWorkload(), ToyWorkload()]
    stuck[1].gate.clear()
    async with group(controller, *stuck) as made:
        made.runner._interrupt = lambda: None
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(raised(made.runner.run()))
            await until(stuck[1].entered.is_set)
            made.runner.abandon("no time")
        error = running.result()
        assert isinstance(error, PeerLost)
        assert "did not pause" in str(error)
        assert len(controller.returned) == 2 * controller.issued
        made.interrupt()


async def raised(work: Any) -> BaseException | None:
    try:
        await work
    except PenstockError as error:
        return error
    return None


@pytest.mark.parametrize("share", [False, True])
async def test_an_error_that_is_no_prompts_fault_fails_every_rank_with_it(share: bool) -> None:
    controller = ScriptedController(1000)
    made = Group(controller, [ToyWorkload(), ToyWorkload("generate", frozenset({5}), RunFailed)], True, share)
    error = await raised(made.runner.run())
    assert isinstance(error, RunFailed)
    assert "rank 1: generate broke on purpose" in str(error)
    for stepping in made.stepping:
        assert isinstance(await raised(asyncio.wait_for(asyncio.wrap_future(stepping), 20)), RunFailed)
    assert controller.settled() == list(range(2 * controller.issued)), "every lease went back"
    made.threads.close(5.0)


async def test_a_desk_that_is_lost_ends_the_group() -> None:
    controller = ScriptedController(1000)

    async def lost() -> None:
        raise PeerLost("the controller is gone")

    controller.delivering = lost
    async with group(controller) as made:
        error = await raised(made.runner.run())
        assert isinstance(error, PeerLost)
        assert "the controller is gone" in str(error)


async def test_ranks_rest_between_two_runs_and_hear_of_weights_and_payloads_meanwhile() -> None:
    controller = ScriptedController(8)
    manifest = Manifest(Version(3), "lineage", "digest", (), "weights/3")
    async with group(controller) as made:
        await made.runner.run()
        made.runner.announce(manifest)
        await until(lambda: len(made.did("announced")) == RANKS)
        assert {said for _, said in made.did("announced")} == {manifest}
        rested = len(made.did("rest"))
        controller.prompts = 16
        made.runner.devices = (4, 7)
        await made.runner.run()
        assert sorted(made.did("wake")[-RANKS:]) == [(rank, (4, 7)) for rank in range(RANKS)], (
            "each finds its own among them"
        )
        assert len(made.did("rest")) == rested + RANKS
        assert controller.settled() == list(range(32))


async def test_samples_of_every_rank_carry_the_times_of_the_controllers_calls() -> None:
    controller = ScriptedController(20)
    lease = controller.lease

    async def leasing(samples: int, wait_s: float) -> Any:
        await asyncio.sleep(0.02)
        return await lease(samples, wait_s)

    async def delivering() -> None:
        await asyncio.sleep(0.02)

    controller.lease = leasing  # type: ignore[method-assign]
    controller.delivering = delivering
    async with group(controller) as made:
        await made.runner.run()
        assert not made.runner._lease_s, "nothing is kept of samples that left"
    assert min(rollout.times.lease_s for rollout in controller.rollouts) >= 0.02
    assert controller.rollouts[0].times.deliver_s == 0.0
    assert controller.rollouts[-1].times.deliver_s >= 0.02


async def test_what_the_desk_refuses_is_discarded_in_the_ring_it_lies_in() -> None:
    controller = ScriptedController(4)
    deliver = controller.deliver

    async def refusing(rollouts: Any, failures: Any, returned: Any, scores: Any = ()) -> Any:
        answer = await deliver(rollouts, failures, returned)
        return type(answer)(refused=tuple(rollout.sample for rollout in rollouts))

    controller.deliver = refusing  # type: ignore[method-assign]
    async with group(controller) as made:
        await made.runner.run()
        await until(lambda: sum(len(refs) for rank, refs in made.did("discard") if rank == 1) == 8)
        assert all(isinstance(ref, PayloadRef) for _, refs in made.did("discard") for ref in refs)


async def test_what_the_controller_says_is_unread_is_discarded_by_every_rank() -> None:
    async with group(ScriptedController(4)) as made:
        unread = [PayloadRef(f"ring-{rank}", 0, 3, 0, 0, 0) for rank in range(RANKS)]
        made.runner.discard(unread)
        await until(lambda: len(made.did("discard")) == RANKS)
        assert sorted(made.did("discard")) == [(rank, tuple(unread)) for rank in range(RANKS)]
        await made.runner.run()


async def test_traces_of_every_rank_tell_what_happened() -> None:
    controller = ScriptedController(12)
    async with group(controller) as made:
        await made.runner.run()
        kinds = {type(told) for told in made.traces}
        assert kinds >= {trace.BranchesTaken, trace.QueueSampled, trace.GenerateEntered, trace.GenerateLeft}
        asked = [told for told in made.runner._tracing.traces if isinstance(told, trace.LeaseAnswered)]
        assert sum(told.granted_samples for told in asked) == 24
        assert asked[-1].verdict == "exhausted"
        await until(lambda: made.runner.statistics().get("batches", 0) >= 6)
        told = made.runner.statistics()
        assert told["delivered_samples"] == 24
        assert told["branch_lease_exhausted"] == 1
