"""The controller's desk as the run needs it: step metrics to a file, unread payloads back to their owners."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from penstock.control import effects
from penstock.control.effects import Effect
from penstock.control.io.desk import ControlDesk
from penstock.control.pipeline import PipelineControl
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName
from penstock.records.payload import PayloadRef
from penstock.runtime.clock import Clock
from penstock.runtime.lag import LagMonitor
from penstock.runtime.metrics import JsonLines
from penstock.wire.messages import AckStep, AskLease, Leased, Ok, Reply, Request

DISCARDS_PER_REPLY = 4096


class FrontDesk(ControlDesk):
    """Answers as the control desk does, and does what only this process knows how to do."""

    def __init__(
        self,
        machines: dict[PipelineName, PipelineControl],
        journal: Journal,
        clock: Clock,
        lines: JsonLines,
        lag: LagMonitor,
        *,
        snapshot_every: int,
    ) -> None:
        super().__init__(machines, journal, clock, on_instruction=self._instructed, snapshot_every=snapshot_every)
        self._machines = machines
        self._lines = lines
        self._lag = lag
        self._written: dict[PipelineName, int] = {}
        self._discards: dict[str, list[PayloadRef]] = defaultdict(list)
        self._offered: dict[str, tuple[int, int]] = {}
        """Per ring, the lease request whose reply carried discards, and how many."""

    async def call(self, request: Request) -> Reply:
        reply = await super().call(request)
        if isinstance(request, AskLease) and isinstance(reply, Leased):
            return self._with_discards(request, reply)
        if isinstance(request, AckStep) and isinstance(reply, Ok):
            self._write_step(request)
        return reply

    def status(self) -> dict[str, Any]:
        return super().status() | {"lag": self._lag.report().values(prefix="")}

    def _instructed(self, name: PipelineName, effect: Effect) -> None:
        if isinstance(effect, effects.ReleasePayloads):
            for ref in effect.payloads:
                self._discards[ref.ring].append(ref)

    def _with_discards(self, request: AskLease, reply: Leased) -> Leased:
        """Repeats a list until the worker asks with a new number, so a lost reply loses no slot."""
        member = self._machines[request.pipeline].members.get(request.member)
        if member is None or not (waiting := self._discards.get(member.ring)):
            return reply
        number, count = self._offered.get(member.ring, (request.request, 0))
        if number != request.request:
            del waiting[:count]
        offered = tuple(waiting[:DISCARDS_PER_REPLY])
        self._offered[member.ring] = (request.request, len(offered))
        return msgspec.structs.replace(reply, discard=offered)

    def _write_step(self, request: AckStep) -> None:
        name, machine = request.pipeline, self._machines[request.pipeline]
        summary = next((step for step in reversed(machine.state.recent) if step.step == request.step), None)
        if summary is None or self._written.get(name) == request.step:
            return
        self._written[name] = request.step
        self._lines.write(
            {
                "kind": "step",
                "at": self._clock.now(),
                "pipeline": name,
                "step": request.step,
                "reward": summary.reward_mean if summary.samples else None,
                "samples": summary.samples,
                "staleness_mean": summary.staleness_mean,
                "staleness_max": summary.staleness_max,
                **request.metrics,
            }
        )
