"""The runner with real threads and a scripted controller: failures in every hook, live flips, awkward stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import Aborted, ConfigError, PeerLost, RunFailed
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.rollout import flow, trace
from penstock.rollout.hooks import Failed, Finished, Outcome, Unusable
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.wire.messages import Delivered, Leased

GROUP = 2


class ScriptedController:
    """Grants `prompts` prompts and remembers what came back."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts
        self.issued = 0
        self.rollouts: list[Any] = []
        self.failures: list[Any] = []
        self.returned: list[SampleId] = []
        self.prefetch: bool | None = None
        self.phase: Any = "running"
        self.asks = 0
        self.delivering: Callable[[], Any] | None = None

    async def lease(self, samples: int, wait_s: float) -> Leased:
        self.asks += 1
        leases = []
        while samples >= GROUP and self.issued < self.prompts:
            first = self.issued * GROUP
            ids = tuple(SampleId(first + member) for member in range(GROUP))
            leases.append(PromptLease(PromptIndex(self.issued), 0, ids, tuple(range(GROUP)), Version(0)))
            self.issued += 1
            samples -= GROUP
        verdict = "granted" if leases else "exhausted"
        return Leased(tuple(leases), verdict, self.phase, self.prefetch)

    async def deliver(
        self, rollouts: Sequence[Any], failures: Sequence[Any], returned: Sequence[SampleId], scores: Sequence[Any] = ()
    ) -> Delivered:
        if self.delivering is not None and (rollouts or failures):
            await self.delivering()
        self.rollouts += rollouts
        self.failures += failures
        self.returned += returned
        return Delivered()

    def settled(self) -> list[int]:
        """Every sample that came back in any way."""
        return sorted(
            [rollout.sample for rollout in self.rollouts]
            + [failure.sample for failure in self.failures]
            + list(self.returned)
        )


class NumberedStore:
    def __init__(self) -> None:
        self.written: list[dict[str, np.ndarray]] = []
        self.discarded: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def write(self, arrays: dict[str, np.ndarray]) -> PayloadRef:
        assert self.gate.wait(20)
        self.written.append(arrays)
        return PayloadRef("ring", 0, len(self.written), 0, 0, 0)

    def discard(self, payloads: Sequence[PayloadRef]) -> None:
        self.discarded += [payload.slot for payload in payloads]


class ToyWorkload:
    """Passes numbers through; `broken` names a hook and the prompts for which it raises."""

    def __init__(
        self, broken: str = "", prompts: frozenset[int] = frozenset(), error: type[BaseException] = ValueError
    ):
        self.broken = broken
        self.prompts = prompts
        self.error = error
        self.generated: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def fault(self, hook: str, prompts: Sequence[int]) -> None:
        if hook == self.broken and self.prompts & set(prompts):
            raise self.error(f"{hook} broke on purpose")

    def preflight(self) -> None:
        if self.broken == "preflight":
            raise self.error("preflight broke on purpose")

    def prepare(self, lease: PromptLease) -> PromptLease | Unusable:
        self.fault("prepare", [lease.prompt])
        if self.broken == "unusable" and lease.prompt in self.prompts:
            return Unusable("far too long")
        return lease

    def collate(self, prepared: Sequence[PromptLease]) -> list[PromptLease]:
        self.fault("collate", [lease.prompt for lease in prepared])
        return list(prepared)

    def generate(self, batch: Sequence[PromptLease]) -> Any:
        self.entered.set()
        assert self.gate.wait(20)
        self.fault("generate", [lease.prompt for lease in batch])
        self.generated.append([lease.prompt for lease in batch])
        return [lease.prompt * 10 for lease in batch]

    def postprocess(self, prepared: PromptLease, generated: int) -> list[Outcome]:
        self.fault("postprocess", [prepared.prompt])
        one_bad = self.broken == "outcome" and prepared.prompt in self.prompts
        return [
            Failed("this one did not work", poison=True)
            if one_bad and member == 0
            else Finished({"number": np.array([generated])}, float(prepared.prompt), Version(0), "d", 1)
            for member in range(len(prepared.samples))
        ]


def settings(prefetch: bool = True, **bounds: Any) -> RunnerSettings:
    sized = {"batch_samples": 4, "queue_samples": 8, **bounds}
    return RunnerSettings(bounds=Bounds(**sized), prefetch=prefetch, lease_wait_s=0.1, drain_s=5.0, return_s=2.0)


async def until(condition: Callable[[], Any], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("prefetch", [False, True])
async def test_every_sample_is_delivered_once_in_order(prefetch: bool) -> None:
    controller, store, workload = ScriptedController(20), NumberedStore(), ToyWorkload()
    runner = Runner(workload, controller, store, settings(prefetch))
    assert await runner.run() == "the prompts are exhausted"
    runner.machine.check()
    assert [rollout.sample for rollout in controller.rollouts] == list(range(40))
    assert [prompt for batch in workload.generated for prompt in batch] == list(range(20))
    assert all(len(batch) <= 2 for batch in workload.generated)
    assert len(store.written) == 40


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("hook", ["prepare", "collate", "generate", "postprocess"])
async def test_a_raising_hook_costs_that_prompt_alone(hook: str, prefetch: bool) -> None:
    controller, workload = ScriptedController(12), ToyWorkload(hook, frozenset({3, 8}))
    runner = Runner(workload, controller, NumberedStore(), settings(prefetch))
    await runner.run()
    runner.machine.check()
    assert sorted(failure.sample for failure in controller.failures) == [6, 7, 16, 17]
    assert all(failure.hook == hook and "broke on purpose" in failure.error for failure in controller.failures)
    assert all("ToyWorkload" in failure.error or "fault" in failure.error for failure in controller.failures)
    assert controller.settled() == list(range(24))


async def test_one_bad_outcome_costs_one_sample() -> None:
    controller = ScriptedController(4)
    await Runner(ToyWorkload("outcome", frozenset({2})), controller, NumberedStore(), settings()).run()
    assert [(failure.sample, failure.poison) for failure in controller.failures] == [(4, True)]
    assert controller.settled() == list(range(8))


async def test_numbers_of_numpy_are_numbers_and_a_reward_that_is_none_costs_its_sample() -> None:
    class Numpy(ToyWorkload):
        def postprocess(self, prepared: PromptLease, generated: int) -> list[Outcome]:
            reward, length = np.float32(np.nan if prepared.prompt == 2 else 0.5), np.int64(3)
            odd = Finished({}, reward, np.int64(0), "d", length)  # type: ignore[arg-type]
            return [odd, *super().postprocess(prepared, generated)[1:]]

    controller = ScriptedController(4)
    runner = Runner(Numpy(), controller, NumberedStore(), settings())
    await runner.run()
    msgspec.msgpack.encode(controller.rollouts)
    assert sorted(rollout.sample for rollout in controller.rollouts) == [0, 1, 2, 3, 5, 6, 7]
    assert [(failure.sample, failure.error) for failure in controller.failures] == [
        (4, "its reward is nan: rewards must be finite")
    ]
    assert runner.statistics()["reward_sum"] == 0.5 * 3 + 0 + 1 + 2 + 3


async def test_an_unusable_prompt_is_poison() -> None:
    controller = ScriptedController(4)
    await Runner(ToyWorkload("unusable", frozenset({1})), controller, NumberedStore(), settings()).run()
    assert [(failure.sample, failure.error, failure.poison) for failure in controller.failures] == [
        (2, "far too long", True),
        (3, "far too long", True),
    ]


async def test_preflight_fails_before_anything_is_leased() -> None:
    controller = ScriptedController(4)
    with pytest.raises(ConfigError, match="broke on purpose"):
        await Runner(ToyWorkload("preflight", error=ConfigError), controller, NumberedStore(), settings()).run()
    assert controller.asks == 0


@pytest.mark.parametrize("hook", ["prepare", "collate", "generate", "postprocess"])
@pytest.mark.parametrize("error", [PeerLost, RunFailed, SystemExit])
async def test_an_error_that_is_no_prompts_fault_ends_the_worker_and_gives_everything_back(
    hook: str, error: type[BaseException]
) -> None:
    controller = ScriptedController(50)
    runner = Runner(ToyWorkload(hook, frozenset({5}), error), controller, NumberedStore(), settings())
    raised = error if issubclass(error, Exception) else RunFailed  # an exit must not pass for a good end
    with pytest.raises(raised, match="broke on purpose"):
        await runner.run()
    runner.machine.check()
    assert controller.issued < 50
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_asking_in_vain_while_a_hook_hangs_is_no_progress() -> None:
    """A worker that seems to make some is never found to be wedged."""

    class Throttling(ScriptedController):
        async def lease(self, samples: int, wait_s: float) -> Leased:
            answer = await super().lease(samples, wait_s)
            return answer if answer.leases else Leased((), "throttled", self.phase)

    controller, workload, told = Throttling(1), ToyWorkload(), list[str]()
    workload.gate.clear()
    runner = Runner(workload, controller, NumberedStore(), settings(), progressed=told.append)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(workload.entered.is_set)
        asked, so_far = controller.asks, len(told)
        await until(lambda: controller.asks > asked + 3)
        assert told[so_far:] == []
        workload.gate.set()
        await until(lambda: "lease throttled" in told)
        runner.stop()
        await running


async def test_a_slow_consumer_stops_the_leasing() -> None:
    controller, store = ScriptedController(1000), NumberedStore()
    store.gate.clear()
    runner = Runner(ToyWorkload(), controller, store, settings(output_samples=8))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(lambda: runner.machine.branches["generate_held_output"] > 0 and runner.machine.line_samples == 8)
        issued = controller.issued
        await until(lambda: runner.machine.line_samples == 8)
        assert controller.issued == issued == 8, "eight samples in the line, eight behind the engine, and not one more"
        store.gate.set()
        await until(lambda: controller.issued > issued)
        runner.stop()
        await running
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_prefetch_flips_while_running() -> None:
    controller, workload = ScriptedController(10_000), ToyWorkload()
    controller.prefetch = False
    runner = Runner(workload, controller, NumberedStore(), settings(True))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(lambda: runner.machine.branches["prefetch_off"] and runner.machine.branches["ask_held_plain"])
        assert not runner.prefetch
        controller.prefetch = True
        await until(lambda: runner.prefetch and runner.machine.branches["ask_held_queue"])
        controller.prefetch = None
        runner.prefetch = False
        await until(lambda: runner.machine.branches["prefetch_off"] == 2)
        runner.stop()
        await running
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_stop_while_the_queue_is_full_returns_the_line_and_finishes_the_engine() -> None:
    controller, workload = ScriptedController(1000), ToyWorkload()
    workload.gate.clear()
    runner = Runner(workload, controller, NumberedStore(), settings())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(lambda: workload.entered.is_set() and runner.machine.line_samples == 8)
        runner.stop("time to go")
        await until(lambda: len(controller.returned) == 8)
        assert not running.done(), "the batch in the engine is still being waited for"
        workload.gate.set()
        assert await running == "time to go"
    assert [rollout.sample for rollout in controller.rollouts] == [0, 1, 2, 3]
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_a_stop_in_the_same_breath_as_an_ask_ends_at_once() -> None:
    """The ask is cancelled before its task has run at all; nothing may wait for its answer."""

    class StoppedAtOnce(Runner):
        def _post(self, *events: Any) -> None:
            super()._post(*events)
            if any(isinstance(event, flow.Started) for event in events):
                self.stop("never mind")

    controller = ScriptedController(1000)
    runner = StoppedAtOnce(ToyWorkload(), controller, NumberedStore(), settings())
    assert await runner.run() == "never mind"
    assert controller.asks == 0
    assert "abandoned" not in runner.statistics()


async def test_a_stop_does_not_wait_for_a_desk_that_holds_the_ask() -> None:
    class HoldingController(ScriptedController):
        async def lease(self, samples: int, wait_s: float) -> Leased:
            self.asks += 1
            await asyncio.Event().wait()
            raise AssertionError("never answered")

    controller = HoldingController(1000)
    runner = Runner(ToyWorkload(), controller, NumberedStore(), settings())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(lambda: controller.asks == 1)
        runner.stop("enough")
        assert await running == "enough"


async def test_a_drain_that_takes_too_long_is_abandoned_and_everything_goes_back() -> None:
    controller, workload = ScriptedController(1000), ToyWorkload()
    workload.gate.clear()
    bounded = RunnerSettings(
        bounds=Bounds(batch_samples=4, queue_samples=8), lease_wait_s=0.1, drain_s=0.05, return_s=0.2
    )
    interrupted = threading.Event()
    runner = Runner(workload, controller, NumberedStore(), bounded, interrupt=interrupted.set)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(lambda: workload.entered.is_set() and runner.machine.line_samples == 8)
        runner.stop("time to go")
        assert await running == "time to go"
    assert interrupted.is_set()
    workload.gate.set()
    assert not controller.rollouts
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_abandoning_gives_back_what_the_engine_holds_and_fails_nothing() -> None:
    """An interrupted generation is no failure: a prompt alone in the engine must not count as failed."""
    controller, workload = ScriptedController(1), ToyWorkload("generate", frozenset({0}), error=Aborted)
    workload.gate.clear()
    runner = Runner(workload, controller, NumberedStore(), settings(), interrupt=workload.gate.set)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(workload.entered.is_set)
        runner.abandon("preempted")
        assert await running == "preempted"
    assert not controller.failures
    assert controller.settled() == list(range(GROUP))


async def test_payloads_of_leases_that_go_back_are_discarded_in_whatever_stage_they_are() -> None:
    """They would never be read: a worker that is put to sleep again and again filled its ring with them."""
    controller, store = ScriptedController(6), NumberedStore()
    delivering = asyncio.Event()

    async def never() -> None:
        delivering.set()
        await asyncio.sleep(60.0)

    controller.delivering = never
    runner = Runner(ToyWorkload(), controller, store, settings(output_samples=100))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await delivering.wait()
        in_delivery = runner.machine.held.samples(flow.Stage.DELIVERING)
        await until(lambda: runner.machine.held.samples(flow.Stage.FINISHED) >= 2 * GROUP)
        store.gate.clear()  # whatever is being written now is given back meanwhile
        runner.abandon("asleep by order of the pool")
        await until(lambda: runner.machine.ending)
        store.gate.set()
        await running
    assert in_delivery >= GROUP
    await until(lambda: len(store.written) - in_delivery == len(set(store.discarded)))


async def test_a_payload_whose_lease_goes_back_while_it_is_written_is_discarded() -> None:
    controller, store = ScriptedController(2), NumberedStore()
    store.gate.clear()
    writing = threading.Event()
    write = store.write

    def watched(arrays: dict[str, np.ndarray]) -> PayloadRef:
        writing.set()
        return write(arrays)

    store.write = watched  # type: ignore[method-assign]
    runner = Runner(ToyWorkload(), controller, store, settings(batch_samples=2))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        await until(writing.is_set)
        runner.abandon("asleep by order of the pool")
        await until(lambda: controller.returned)
        store.gate.set()
        await running
    await until(lambda: len(store.written) == GROUP)
    await until(lambda: sorted(store.discarded) == [1, 2])


async def test_an_unrequested_cancellation_is_an_error_of_the_hook() -> None:
    class Leaking(ToyWorkload):
        async def generate(self, batch: Sequence[PromptLease]) -> Any:
            raise asyncio.CancelledError("a task of the hook was cancelled")

    controller = ScriptedController(4)
    with pytest.raises(RunFailed, match="generate raised CancelledError: a task of the hook was cancelled"):
        async with asyncio.timeout(20.0):
            await Runner(Leaking(), controller, NumberedStore(), settings()).run()
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_a_completed_run_abandons_what_is_left() -> None:
    controller = ScriptedController(1000)
    controller.phase = "complete"
    assert await Runner(ToyWorkload(), controller, NumberedStore(), settings()).run() == "the run is complete"
    assert controller.settled() == list(range(controller.issued * GROUP))


async def test_a_desk_that_is_lost_ends_the_worker() -> None:
    class LostController(ScriptedController):
        async def lease(self, samples: int, wait_s: float) -> Leased:
            if self.issued >= 4:
                raise PeerLost("the controller is gone")
            return await super().lease(samples, wait_s)

    with pytest.raises(PeerLost, match="controller is gone"):
        await Runner(ToyWorkload(), LostController(1000), NumberedStore(), settings()).run()


async def test_a_request_engine_has_many_generations_in_flight() -> None:
    class RequestWorkload(ToyWorkload):
        in_flight = most = 0

        async def generate(self, batch: Sequence[PromptLease]) -> Any:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            released = asyncio.Event()
            asyncio.get_running_loop().call_later(0.005, released.set)
            await released.wait()
            self.in_flight -= 1
            self.fault("generate", [lease.prompt for lease in batch])
            return [lease.prompt for lease in batch]

    controller, workload = ScriptedController(40), RequestWorkload("generate", frozenset({7}))
    await Runner(
        workload, controller, NumberedStore(), settings(batch_samples=2, queue_samples=16, concurrency=6)
    ).run()
    assert workload.most == 6
    assert sorted(failure.sample for failure in controller.failures) == [14, 15]
    assert controller.settled() == list(range(80))


async def test_traces_tell_what_happened() -> None:
    controller = ScriptedController(8)
    told: list[trace.Trace] = []
    runner = Runner(
        ToyWorkload("generate", frozenset({0})), controller, NumberedStore(), settings(), traced=told.append
    )
    await runner.run()
    kinds = {type(one) for one in told}
    assert kinds == {
        trace.BranchesTaken,
        trace.QueueSampled,
        trace.GenerateEntered,
        trace.GenerateLeft,
        trace.LeaseAnswered,
    }
    assert sum(isinstance(one, trace.GenerateEntered) for one in told) == sum(
        isinstance(one, trace.GenerateLeft) for one in told
    )
    assert any(isinstance(one, trace.GenerateLeft) and "broke on purpose" in one.error for one in told)
    assert all(trace.as_line(one) for one in told)
    assert list(runner.traces) == told
    statistics = runner.statistics()
    assert statistics["delivered_samples"] == 14
    assert statistics["failed_samples"] == 2
    assert statistics["branch_batch_split"] == 1
    assert all(rollout.times.generate_s >= 0 and rollout.times.waited_s >= 0 for rollout in controller.rollouts)
