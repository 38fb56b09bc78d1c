"""Calls that wait for a fleet: a replica for newer weights, a trainer for being asked to save its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.control.io.service import Answerer
from penstock.control.io.waiting import HeldCalls, deadline
from penstock.records.ids import MemberId, PipelineName
from penstock.records.weights import Held, Manifest
from penstock.weights.coordination import Coordination
from penstock.wire.messages import AskCheckpoint, AskWeights, CheckpointWanted, NotYet, Phase, Reply, Weights


class Machine(Protocol):
    @property
    def phase(self) -> Phase: ...
    @property
    def weights(self) -> Manifest | None: ...
    def keeps_weights(self, member: MemberId, held: Held) -> bool: ...


class FleetCalls:
    """Answers out of the fleets, which know only what is committed already."""

    def __init__(
        self,
        fleets: Mapping[PipelineName, Coordination],
        machines: Mapping[PipelineName, Machine],
        waiting: Callable[[], HeldCalls],
        now: Callable[[], float],
    ) -> None:
        self._fleets = fleets
        self._machines = machines
        self._waiting = waiting
        self._now = now
        self.answerers: dict[type, Answerer] = {AskWeights: self.ask_weights, AskCheckpoint: self.ask_checkpoint}

    async def ask_weights(self, request: AskWeights) -> Reply:
        """Held until another version than the one held is offered; only the newest loadable one ever is."""
        name, waiting, until = request.pipeline, self._waiting(), deadline(request.wait_s)
        fleet, machine = self._fleets[name], self._machines[name]
        with waiting.holding(name, "ask_weights"):
            # Between a trainer's return to an earlier step and its first publication nothing is worth loading; and one
            # that evaluates a version, or is about to, goes on serving it.
            while (
                machine.weights is None
                or machine.keeps_weights(request.member, request.held)
                or (offer := self._offer(fleet, request)) is None
            ):
                if machine.phase == "stopped" or not await waiting.hold(name, ("weights", "phase"), until):
                    first = machine.weights is None
                    return NotYet("the first weights of the trainer" if first else "newer weights", machine.phase)
        return Weights(offer)

    def _offer(self, fleet: Coordination, request: AskWeights) -> Manifest | None:
        return fleet.offer(request.member, request.held, self._now())

    async def ask_checkpoint(self, request: AskCheckpoint) -> Reply:
        """Held until the fleet wants a checkpoint; the same answer comes again until it was published, durably."""
        name, waiting, until = request.pipeline, self._waiting(), deadline(request.wait_s)
        fleet, machine = self._fleets[name], self._machines[name]
        with waiting.holding(name, "ask_checkpoint"):
            while not (reason := fleet.transaction.checkpoint_wanted):
                if machine.phase == "stopped" or not await waiting.hold(name, ("checkpoint", "phase"), until):
                    return NotYet("a reason to save out of turn", machine.phase)
        return CheckpointWanted(reason)
