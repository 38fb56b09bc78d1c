"""The order executor on a real loop: step order, rollback, deadlines, newer orders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.pool.io.executor import OrderExecutor
from penstock.records.ids import MemberId, PipelineName, Version
from penstock.records.pool import DeviceId, Order, OrderNumber, SeatId
from penstock.wire.messages import AskOrders, Ok, Orders, Reply, ReportOrder, Request

WAKE = ["wake", "sync_weights", "publish 7", "route"]
UNDO = ["close_admission", "abort", "release", "verify_released"]


class ScriptedSleeper:
    """Writes down every step; a step named in `broken` raises, one named in `stuck` never ends."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.broken: set[str] = set()
        self.stuck: set[str] = set()
        self.got_stuck = asyncio.Event()

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")
        if name in self.stuck:
            self.got_stuck.set()
            await asyncio.Event().wait()

    async def wake(self, devices: tuple[DeviceId, ...]) -> None:
        await self._step("wake")

    async def sync_weights(self) -> Version:
        await self._step("sync_weights")
        return Version(7)

    async def publish(self, version: Version) -> None:
        await self._step(f"publish {version}")

    async def route(self) -> None:
        await self._step("route")

    async def close_admission(self) -> None:
        await self._step("close_admission")

    async def drain(self) -> None:
        await self._step("drain")

    async def abort(self) -> None:
        await self._step("abort")

    async def release(self) -> None:
        await self._step("release")

    async def verify_released(self) -> None:
        await self._step("verify_released")


class Controller:
    """Gives out the order it is told to, and collects reports."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.changed = asyncio.Condition()
        self.reports: list[ReportOrder] = []

    async def call(self, request: Request) -> Reply:
        async with self.changed:
            if isinstance(request, ReportOrder):
                self.reports.append(request)
                self.changed.notify_all()
                return Ok()
            assert isinstance(request, AskOrders)
            await self.changed.wait_for(lambda: self.order is not None and self.order.number != request.seen)
            assert self.order is not None
            return Orders((self.order,))

    async def give(self, order: Order) -> None:
        async with self.changed:
            self.order = order
            self.changed.notify_all()

    async def reported(self, count: int) -> ReportOrder:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.reports) >= count)
            return self.reports[count - 1]


def order(number: int, action, *, abort: bool = False, drain_s: float = 5.0, within_s: float = 10.0) -> Order:
    return Order(OrderNumber(number), SeatId(1), action, (DeviceId(0),), abort, drain_s, within_s)


async def with_executor(story: Callable[[ScriptedSleeper, Controller, OrderExecutor], Awaitable[None]]) -> None:
    sleeper, controller = ScriptedSleeper(), Controller()
    executor = OrderExecutor(sleeper, controller.call, PipelineName("a"), MemberId("a-0"), poll_s=1.0, undo_s=0.2)
    running = asyncio.ensure_future(executor.run())
    try:
        await story(sleeper, controller, executor)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_wake_and_sleep_in_the_promised_order():
    async def story(sleeper: ScriptedSleeper, controller: Controller, executor: OrderExecutor) -> None:
        await controller.give(order(1, "wake"))
        assert (await controller.reported(1)).done
        assert sleeper.steps == WAKE
        assert executor.awake
        await controller.give(order(2, "sleep"))
        assert (await controller.reported(2)).done
        assert sleeper.steps[4:] == ["close_admission", "drain", "release", "verify_released"]
        await controller.give(order(3, "wake"))
        await controller.reported(3)
        await controller.give(order(4, "sleep", abort=True))
        assert (await controller.reported(4)).done
        assert sleeper.steps[-4:] == ["close_admission", "abort", "release", "verify_released"]

    await with_executor(story)


async def test_a_drain_that_takes_too_long_becomes_an_abort():
    async def story(sleeper: ScriptedSleeper, controller: Controller, executor: OrderExecutor) -> None:
        sleeper.stuck = {"drain"}
        await controller.give(order(1, "sleep", drain_s=0.05))
        assert (await controller.reported(1)).done
        assert sleeper.steps == ["close_admission", "drain", "abort", "release", "verify_released"]

    await with_executor(story)


@pytest.mark.parametrize("step", WAKE)
@pytest.mark.parametrize("how", ["broken", "stuck"])
async def test_a_wake_that_stops_at_any_step_is_undone(step: str, how: str):
    async def story(sleeper: ScriptedSleeper, controller: Controller, executor: OrderExecutor) -> None:
        setattr(sleeper, how, {step})
        await controller.give(order(1, "wake", within_s=0.1))
        report = await controller.reported(1)
        assert (report.done, report.released) == (False, True)
        assert report.error
        assert sleeper.steps == [*WAKE[: WAKE.index(step) + 1], *UNDO]
        assert not executor.awake

    await with_executor(story)


@pytest.mark.parametrize("how", ["broken", "stuck"])
@pytest.mark.parametrize("step", ["release", "verify_released"])
async def test_what_cannot_be_proved_free_is_not_called_free(step: str, how: str):
    async def story(sleeper: ScriptedSleeper, controller: Controller, executor: OrderExecutor) -> None:
        setattr(sleeper, how, {step})
        await controller.give(order(1, "sleep", within_s=0.1))
        report = await controller.reported(1)
        assert (report.done, report.released) == (False, False)

    await with_executor(story)


async def test_a_newer_order_ends_an_older_one():
    async def story(sleeper: ScriptedSleeper, controller: Controller, executor: OrderExecutor) -> None:
        sleeper.stuck = {"sync_weights"}
        await controller.give(order(1, "wake"))
        async with asyncio.timeout(10):
            await sleeper.got_stuck.wait()
        await controller.give(order(2, "sleep", abort=True))
        report = await controller.reported(1)
        assert (report.order, report.done) == (2, True)
        assert sleeper.steps == ["wake", "sync_weights", *UNDO]

    await with_executor(story)
