"""What each kind of call means: the event it becomes, and what it waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from penstock.control import effects, events
from penstock.control.effects import Effect
from penstock.control.events import Event
from penstock.control.io.answers import reply
from penstock.control.io.waiting import WaitingRoom, deadline
from penstock.records.ids import MemberId, PipelineName, Version
from penstock.wire import messages
from penstock.wire.messages import Reply

Answerer = Callable[[Any], Awaitable[Reply]]
Steadiness = Callable[[PipelineName, MemberId, Version], bool]


class Desk(Protocol):
    """What answering takes."""

    @property
    def pipelines(self) -> Mapping[PipelineName, object]: ...
    @property
    def metrics(self) -> dict[tuple[PipelineName, MemberId], dict[str, float]]: ...
    @property
    def waiting(self) -> WaitingRoom: ...
    def happen(self, name: PipelineName, event: Event) -> list[Effect]: ...
    async def settle(self) -> None: ...


class Calls:
    """One method per kind of call. Whatever an answer promises is committed before the method returns it."""

    def __init__(self, desk: Desk, is_steady: Steadiness) -> None:
        """`is_steady` says whether a worker's weights will stay what they are."""
        self._desk = desk
        self._is_steady = is_steady
        self.answerers: dict[type, Answerer] = {
            messages.Register: self.register,
            messages.Unregister: self.unregister,
            messages.Heartbeat: self.heartbeat,
            messages.AskLease: self.ask_lease,
            messages.Deliver: self.deliver,
            messages.AskBatch: self.ask_batch,
            messages.AckStep: self.ack_step,
            messages.AckCheckpoint: self.ack_checkpoint,
            messages.PublishWeights: self.publish_weights,
            messages.ReportReplica: self.report_replica,
            messages.ReportMetrics: self.report_metrics,
            messages.Stop: self.stop,
        }

    async def register(self, request: messages.Register) -> Reply:
        event = events.MemberRegistered(
            member=request.member,
            role=request.role,
            pid=request.pid,
            host_id=request.host_id,
            ring=request.ring,
            more_rings=request.more_rings,
            prompt_count=request.prompt_count,
            step=request.step,
            lineage=request.lineage,
        )
        return await self._decided(request.pipeline, event)

    async def unregister(self, request: messages.Unregister) -> Reply:
        left = events.MemberLeft(request.member, request.reason, request.died, request.failed)
        answer = await self._decided(request.pipeline, left)
        self._desk.metrics.pop((request.pipeline, request.member), None)
        return answer

    async def heartbeat(self, request: messages.Heartbeat) -> Reply:
        event = events.HeartbeatHeard(request.member, request.progressed_ago_s, request.doing)
        return reply(self._desk.happen(request.pipeline, event)[0])  # promises nothing, so it waits for no commit

    async def ask_lease(self, request: messages.AskLease) -> Reply:
        """Held while throttled; told at once that the weights are too old, for waiting here would not renew them."""
        name, waiting = request.pipeline, self._desk.waiting
        until = deadline(request.wait_s)
        answer = self._lease(request, waiting.seated(name, "ask_lease"))
        if _throttled(answer):
            with waiting.seat(name, "ask_lease"):
                while _throttled(answer) and await waiting.hold(name, ("leases", "phase"), until):
                    answer = self._lease(request, waiting.seated(name, "ask_lease") - 1)
        await self._desk.settle()
        return reply(answer)

    def _lease(self, request: messages.AskLease, others: int) -> Effect:
        steady = self._is_steady(request.pipeline, request.member, request.version)
        event = events.LeaseAsked(request.member, request.request, request.samples, request.version, others, steady)
        return self._desk.happen(request.pipeline, event)[0]

    async def ask_batch(self, request: messages.AskBatch) -> Reply:
        name, waiting = request.pipeline, self._desk.waiting
        until = deadline(request.wait_s)
        event = events.BatchAsked(request.member, request.step)
        with waiting.seat(name, "ask_batch"):
            answer = self._desk.happen(name, event)[0]
            while isinstance(answer, effects.DeferBatch) and await waiting.hold(name, ("batches", "phase"), until):
                answer = self._desk.happen(name, event)[0]
        await self._desk.settle()
        return reply(answer)

    async def deliver(self, request: messages.Deliver) -> Reply:
        event = events.Delivered(request.member, request.rollouts, request.failures, request.returned, request.scores)
        return await self._decided(request.pipeline, event)

    async def ack_step(self, request: messages.AckStep) -> Reply:
        event = events.StepAcked(
            member=request.member,
            step=request.step,
            missing_prompts=request.missing_prompts,
            missing_reason=request.missing_reason,
            metrics=request.metrics,
        )
        return await self._decided(request.pipeline, event)

    async def ack_checkpoint(self, request: messages.AckCheckpoint) -> Reply:
        return await self._decided(
            request.pipeline, events.CheckpointSaved(request.member, request.step, request.last_resort)
        )

    async def publish_weights(self, request: messages.PublishWeights) -> Reply:
        return await self._decided(request.pipeline, events.WeightsPublished(request.member, request.manifest))

    async def report_replica(self, request: messages.ReportReplica) -> Reply:
        return messages.Ok()  # no event of the pipeline's: it is for whoever keeps the fleet

    async def report_metrics(self, request: messages.ReportMetrics) -> Reply:
        self._desk.metrics[request.pipeline, request.member] = request.values
        return messages.Ok()

    async def stop(self, request: messages.Stop) -> Reply:
        """Ends the whole run: every pipeline hears of it."""
        for name in self._desk.pipelines:
            self._desk.happen(name, events.StopAsked(request.reason, request.failed))
        await self._desk.settle()
        return messages.Ok()

    async def _decided(self, name: PipelineName, event: Event) -> Reply:
        """The answer to a call that does not wait, once it may be told."""
        answer = self._desk.happen(name, event)[0]
        await self._desk.settle()
        return reply(answer)


def _throttled(answer: Effect) -> bool:
    return isinstance(answer, effects.RefuseLease) and answer.verdict == "throttled"
