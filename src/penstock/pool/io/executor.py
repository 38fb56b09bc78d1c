"""The worker side of a move: carries out the pool's orders step by step, with rollback.

    wake:   wake → sync weights → publish the version once → route
    sleep:  close admission → drain, or abort keeping the prefix → release → verify released

A move that fails or is late is undone (admission closed, samples aborted, devices released and verified) before it is
reported. A newer order cancels an older one at once; carrying out the newer one undoes what the older one began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.errors import RemoteProtocolError
from penstock.records.ids import MemberId, PipelineName, Version
from penstock.records.pool import DeviceId, Order, OrderNumber
from penstock.wire.messages import AskOrders, Orders, Reply, ReportOrder, Request

logger = logging.getLogger(__name__)


class Sleeper(Protocol):
    """An engine with its generation loop, controlled by the pool.

    Every step may be repeated, in any state. A cancelled step may have left threads running: the next step waits for
    them. A step that fails raises; the user reads the message.
    """

    async def wake(self, devices: tuple[DeviceId, ...]) -> None:
        """Take the devices; refuse if they are occupied."""
        ...

    async def sync_weights(self) -> Version:
        """Load the newest published weights, completely and verified; returns their version."""
        ...

    async def publish(self, version: Version) -> None:
        """Report the version this engine serves now. Called once per wake."""
        ...

    async def route(self) -> None:
        """Open admission: samples may be leased and generated."""
        ...

    async def close_admission(self) -> None:
        """Lease no further samples."""
        ...

    async def drain(self) -> None:
        """Return when no sample is running."""
        ...

    async def abort(self) -> None:
        """Stop running samples at the next decode step; partial samples are kept for the next worker."""
        ...

    async def release(self) -> None:
        """Free the devices: no memory, no running kernel."""
        ...

    async def verify_released(self) -> None:
        """Raise unless the devices are free, as far as can be measured."""
        ...


class OrderExecutor:
    """Runs beside the generation loop of one worker during the worker's lifetime.

    Consumes orders (long poll); produces one report per order that was not superseded; waits for the steps of the
    sleeper, each order within its time; unblocked by a newer order, or by cancelling `run`.
    """

    def __init__(
        self,
        sleeper: Sleeper,
        call: Callable[[Request], Awaitable[Reply]],
        pipeline: PipelineName,
        member: MemberId,
        *,
        poll_s: float = 10.0,
        undo_s: float = 30.0,
    ) -> None:
        self._sleeper = sleeper
        self._call = call
        self._pipeline = pipeline
        self._member = member
        self._poll_s = poll_s
        self._undo_s = undo_s
        self.doing = "asleep"
        """The current step, for the heartbeat and the diagnosis."""
        self.awake = False

    async def run(self) -> None:
        """Carries out orders until cancelled."""
        seen = OrderNumber(0)
        async with asyncio.TaskGroup() as group:
            move: asyncio.Task[None] | None = None
            while True:
                reply = await self._call(AskOrders(self._pipeline, self._member, seen, self._poll_s))
                if not isinstance(reply, Orders):
                    raise RemoteProtocolError(f"the controller answered AskOrders with {type(reply).__name__}")
                for order in reply.orders:
                    if order.number <= seen:
                        continue
                    seen = order.number
                    if move is not None and not move.done():
                        move.cancel()
                        await asyncio.wait([move])
                    move = group.create_task(self._carry_out(order), name=f"order-{order.number}")

    async def _carry_out(self, order: Order) -> None:
        steps = self._wake if order.action == "wake" else self._sleep
        released, error = False, ""
        try:
            async with asyncio.timeout(order.within_s):
                await steps(order)
        except TimeoutError as late:
            error = f"'{self.doing}' did not end: the order allows {order.within_s:g} s {late}".strip()
        except Exception as failure:  # noqa: BLE001 - any error of a step is reported, and the move is undone
            error = f"'{self.doing}' failed: {type(failure).__name__}: {failure}"
        if error:
            logger.warning("order %d to %s on %s: %s", order.number, order.action, list(order.devices), error)
            released = await self._undo()
        self.doing = "serving" if self.awake else "asleep"
        await self._call(
            ReportOrder(self._pipeline, self._member, order.number, done=not error, released=released, error=error)
        )

    async def _wake(self, order: Order) -> None:
        self.doing = f"waking on {list(order.devices)}"
        await self._sleeper.wake(order.devices)
        self.doing = "loading weights"
        version = await self._sleeper.sync_weights()
        self.doing = f"publishing version {version}"
        await self._sleeper.publish(version)
        self.doing = "opening admission"
        await self._sleeper.route()
        self.awake = True

    async def _sleep(self, order: Order) -> None:
        self.awake = False
        self.doing = "closing admission"
        await self._sleeper.close_admission()
        drained = False
        if not order.abort:
            self.doing = "draining"
            try:
                async with asyncio.timeout(order.drain_s):
                    await self._sleeper.drain()
                drained = True
            except TimeoutError:
                logger.info("order %d: not drained within %g s, aborting", order.number, order.drain_s)
        if not drained:
            self.doing = "aborting"
            await self._sleeper.abort()
        await self._release()

    async def _release(self) -> None:
        self.doing = "releasing devices"
        await self._sleeper.release()
        self.doing = "verifying that the devices are free"
        await self._sleeper.verify_released()

    async def _undo(self) -> bool:
        """Back to sleep from any step of the move; True if the devices are verified free."""
        self.awake = False
        try:
            async with asyncio.timeout(self._undo_s):
                self.doing = "undoing the move"
                await self._sleeper.close_admission()
                await self._sleeper.abort()
                await self._release()
        except TimeoutError:
            logger.error("'%s' did not end within %g s: the pool will end this process", self.doing, self._undo_s)
            return False
        except Exception:
            logger.exception("'%s' failed: the pool will end this process", self.doing)
            return False
        return True

    def __repr__(self) -> str:
        return f"<OrderExecutor of {self._member}: {self.doing}>"
