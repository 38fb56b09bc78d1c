from __future__ import annotations

import asyncio
import sys

import pytest

from penstock.runtime import clock
from penstock.runtime.offload import background
from penstock.sim.loop import Deadlock, Process, TooSlow, VirtualLoop, virtual_loop


def a_second(offload: str, function: str) -> float:
    return 1.0


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    with virtual_loop(a_second) as loop:
        assert loop.run_until_complete(main()) == 3600.0


def test_a_wait_that_nothing_can_end_is_named() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    with virtual_loop(a_second) as loop, pytest.raises(Deadlock, match="wait_for_nothing"):
        loop.run_until_complete(wait_for_nothing())


def test_a_busy_loop_is_bounded_in_real_time() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with virtual_loop(a_second, real_limit_s=0.05) as loop, pytest.raises(TooSlow):
        loop.run_until_complete(spin())


def test_offloaded_work_takes_virtual_time_and_may_sleep() -> None:
    def work() -> float:
        clock.sleep(5.0)
        return clock.monotonic()

    async def main() -> tuple[float, float]:
        offload = background(1, "work")
        both = await asyncio.gather(offload.run(work), asyncio.to_thread(clock.monotonic))
        await asyncio.to_thread(offload.close, 1.0)
        return both[0], both[1]

    with virtual_loop(a_second) as loop:
        assert loop.run_until_complete(main()) == (6.0, 1.0)


def test_one_thread_does_one_thing_at_a_time() -> None:
    async def main() -> list[float]:
        offload = background(1, "work")
        return await asyncio.gather(*(offload.run(clock.monotonic) for _ in range(3)))

    with virtual_loop(a_second) as loop:
        assert loop.run_until_complete(main()) == [1.0, 2.0, 3.0]


async def _tell(told: list[float]) -> None:
    try:
        while True:
            await asyncio.sleep(1.0)
            told.append(asyncio.get_running_loop().time())
    finally:
        told.append(-1.0)


def _life(loop: VirtualLoop, act) -> list[float]:
    told: list[float] = []

    async def main() -> None:
        process = Process(loop, "teller")
        process.run(_tell(told))
        await asyncio.sleep(2.5)
        act(process)
        await asyncio.sleep(4.0)

    loop.run_until_complete(main())
    return list(told)


def test_a_killed_process_does_nothing_more_not_even_its_cleanup() -> None:
    with virtual_loop(a_second) as loop:
        assert _life(loop, Process.kill) == [1.0, 2.0]


def test_a_stopped_process_goes_on_when_it_is_continued() -> None:
    def stop(process: Process) -> None:
        process.stop()
        asyncio.get_running_loop().call_later(2.0, process.resume)

    with virtual_loop(a_second) as loop:
        assert _life(loop, stop) == [1.0, 2.0, 4.5, 5.5, 6.5]


def test_sets_of_tasks_have_the_order_in_which_the_tasks_were_made() -> None:
    ended: list[int] = []

    async def end(number: int) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended.append(number)
            raise

    async def main() -> None:
        group = {asyncio.create_task(end(number)) for number in range(20)}
        await asyncio.sleep(1)
        for task in group:
            task.cancel()
        await asyncio.sleep(1)

    with virtual_loop(a_second) as loop:
        loop.run_until_complete(main())
    assert ended == list(range(20))


@pytest.mark.parametrize("nested", [False, True])
def test_a_group_that_never_hears_of_its_last_task_is_ended_with_the_loop(
    nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process died in between. What its `finally` awaits must not be complained of when it is cleared away."""

    async def dies(process: Process) -> None:
        process.kill()

    async def main(process: Process) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(dies(process))
        finally:
            try:
                await waiting
            finally:
                await asyncio.sleep(1.0)

    async def outer(process: Process) -> None:
        await main(process)

    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    with virtual_loop(a_second) as loop:
        process, waiting = Process(loop, "p"), loop.create_future()
        process.run(outer(process) if nested else main(process))
        loop.run_until_complete(asyncio.sleep(5.0))
    assert not complaints
