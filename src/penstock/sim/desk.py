"""The simulated controller process and the network before it.

Does with the control machine what the real controller does: journals every event that changed it, holds calls that
have to wait, wakes them on announcements, and comes back from its journal after being killed.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from penstock.control import effects, events
from penstock.control.ledger import GroupFilter
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId
from penstock.records.weights import Held
from penstock.sim.engine import Call, Engine, Process
from penstock.sim.faults import FaultLog
from penstock.wire import messages
from penstock.wire.codec import decode_section, encode_section

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5
SNAPSHOT_EVERY = 400

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_section)
_decoder = msgspec.msgpack.Decoder(events.Event, dec_hook=decode_section)


class AskWeights(msgspec.Struct, frozen=True):
    """Waits for another version than the one held; a question, not an event."""

    held: Held
    member: MemberId = MemberId("")


class Pending(msgspec.Struct, eq=False):
    """A call on its way: repeated until one attempt is answered."""

    process: Process
    call: Call
    done: bool = False
    held: bool = False


class SimDesk:
    def __init__(
        self,
        engine: Engine,
        settings: PipelineSettings,
        faults: FaultLog,
        random: Random,
        *,
        network_s: float,
        group_filter: GroupFilter | None = None,
        on_effect: Callable[[effects.Effect], None],
        on_answer: Callable[[Any, Any], None],
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.control = PipelineControl(settings, group_filter)
        self.up = True
        self.restarts = 0
        self._filter = group_filter
        self._faults = faults
        self._random = random
        self._network_s = network_s
        self._on_effect = on_effect
        self._on_answer = on_answer
        self._held: dict[str, list[Pending]] = {"leases": [], "batches": [], "weights": []}
        self._journal: list[tuple[bytes, float]] = []
        self._snapshot: bytes | None = None
        self._journalling = faults.faults.kill_controller_every_s > 0
        engine.place_call = self.send
        self._tick()

    # -- the network --------------------------------------------------------------------------------------------

    def send(self, process: Process, call: Call) -> None:
        self._attempt(Pending(process, call))

    def _attempt(self, pending: Pending) -> None:
        if pending.done or not pending.process.owner.alive:
            return
        engine, faults = self.engine, self._faults
        if faults.strikes("request lost", faults.faults.lose_request, engine.now):
            engine.after(CALL_TIMEOUT_S, self._attempt, pending)
            return
        engine.after(self._delay_s(), self._arrive, pending)
        if faults.strikes("request repeated", faults.faults.repeat_request, engine.now):
            engine.after(2 * self._delay_s(), self._arrive, pending)

    def _delay_s(self) -> float:
        return self._network_s * (0.5 + self._random.random())

    def _arrive(self, pending: Pending) -> None:
        if not self.up:
            self.engine.after(RETRY_S, self._attempt, pending)
            return
        if pending.held or pending.done:
            return
        self._answer(pending, self.engine.now + pending.call.wait_s)

    def _reply(self, pending: Pending, answer: Any) -> None:
        faults = self._faults
        pending.held = False
        if faults.strikes("reply lost", faults.faults.lose_reply, self.engine.now):
            self.engine.after(CALL_TIMEOUT_S, self._attempt, pending)
            return
        self.engine.after(self._delay_s(), self._receive, pending, answer)

    def _receive(self, pending: Pending, answer: Any) -> None:
        if not pending.done:
            pending.done = True
            self.engine.resume(pending.process, answer)

    # -- the controller -----------------------------------------------------------------------------------------

    def _answer(self, pending: Pending, deadline: float) -> None:
        answer, topic = self._decide(pending)
        if topic and self._hold(pending, topic, deadline):
            return
        self._reply(pending, answer)

    def _decide(self, pending: Pending) -> tuple[Any, str]:
        """The answer to a call, and what to hold the call for if that may bring a better one."""
        request = pending.call.request
        if isinstance(request, AskWeights):
            keeps = self.control.keeps_weights(request.member, request.held)
            weights = None if keeps else self.control.weights
            fresh = weights if weights is not None and weights.held != request.held else None
            return fresh, "weights" if fresh is None else ""
        if isinstance(request, messages.AskLease):
            others = sum(held.process is not pending.process for held in self._held["leases"])
            steady = self.is_steady(request)
            request = msgspec.structs.replace(request, waiting=others, workers=self.awake(), steady=steady)
        answer = self.happen(request)
        if isinstance(answer, messages.Leased) and answer.verdict == "throttled":
            return answer, "leases"
        return answer, "batches" if isinstance(answer, messages.NotYet) else ""

    def is_steady(self, request: messages.AskLease) -> bool:
        """Whether the asker's weights will stay what they are; here nobody knows."""
        return True

    def awake(self) -> int:
        """Workers on devices of the pool; 0 without a pool."""
        return 0

    def _hold(self, pending: Pending, topic: str, deadline: float) -> bool:
        if self.engine.now >= deadline:
            return False
        if not pending.held:
            self.engine.after(deadline - self.engine.now, self._expire, pending, topic)
        pending.held = True
        self._held[topic].append(pending)
        return True

    def _expire(self, pending: Pending, topic: str) -> None:
        if pending.held and pending in self._held[topic]:
            self._held[topic].remove(pending)
            self._answer(pending, self.engine.now)

    def happen(self, event: events.Event) -> Any:
        """Feeds the machine one event, journals it if it changed something, and does what it was told."""
        control, now = self.control, self.engine.now
        before = control.revision
        decided = control.handle(event, now)
        if self._journalling and control.revision != before:
            self._journal.append((_encoder.encode(event), now))
            if len(self._journal) >= SNAPSHOT_EVERY:
                self._snapshot = control.snapshot()
                self._journal.clear()
        answered = not isinstance(event, events.TimePassed)
        if answered:
            self._on_answer(event, decided[0])
        for effect in decided[1:] if answered else decided:
            if isinstance(effect, effects.Announce) and effect.topic in self._held:
                self.engine.after(0.0, self._wake, effect.topic, effect.member)
            else:
                self._on_effect(effect)
        return decided[0] if answered else None

    def _wake(self, topic: str, only: MemberId | None = None) -> None:
        woken = [held for held in self._held[topic] if only is None or held.call.request.member == only]
        self._held[topic] = [held for held in self._held[topic] if held not in woken]
        for pending in woken:
            if pending.process.owner.alive:
                self._answer(pending, self.engine.now + pending.call.wait_s)

    def _tick(self) -> None:
        if self.up:
            self.happen(events.TimePassed())
        self.engine.after(1.0, self._tick)

    def kill(self, down_s: float) -> None:
        """SIGKILL: everything in memory is gone; calls being held see their connection reset."""
        self.up = False
        for topic, waiting in self._held.items():
            for pending in waiting:
                pending.held = False
                self.engine.after(RETRY_S, self._attempt, pending)
            self._held[topic] = []
        self.engine.after(down_s, self._restart)

    def _restart(self) -> None:
        """Comes back from snapshot and journal; the replayed state must be the lost one, bit for bit."""
        lost = self.control.snapshot()
        control = PipelineControl(self.settings, self._filter)
        if self._snapshot is not None:
            control.restore(self._snapshot)
        for event, at in self._journal:
            control.handle(_decoder.decode(event), at)
        if control.snapshot() != lost:
            raise InvalidTransition(f"replay gave {control!r}, the lost state was {self.control!r}")
        self.control = control
        self.up = True
        self.restarts += 1
