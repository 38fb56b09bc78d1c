"""The controller's desk as the run needs it: weights, step metrics, and unread payloads back to their owners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import orjson

from penstock.config.devices import devices_of
from penstock.config.run import Config
from penstock.control import effects
from penstock.control.effects import Effect
from penstock.control.events import RunResumed, SettingsTaken
from penstock.control.io.service import ControlService
from penstock.control.pipeline import PipelineControl
from penstock.control.points import EvaluationResult
from penstock.control.state import StepSummary
from penstock.errors import ConfigError
from penstock.journal.writer import Journal
from penstock.payload.discards import Discards
from penstock.records.ids import POOL, MemberId, PipelineName, Version
from penstock.records.weights import Held
from penstock.roles.fleet import fleet_of, reported
from penstock.roles.fleet_calls import FleetCalls
from penstock.roles.pool_host import PoolHost
from penstock.runtime.clock import Clock
from penstock.runtime.lag import LagMonitor
from penstock.runtime.metrics import JsonLines
from penstock.weights import events as weights
from penstock.wire import messages
from penstock.wire.messages import AckStep, AskLease, Leased, Ok, Refused, Reply, Request

OF_MEMBERS = (messages.AskWeights, messages.AskCheckpoint, messages.ReportReplica)
"""Calls about weights, which the pipelines' own machines do not see."""


class FrontDesk(ControlService):
    """Answers as the control desk does, and does what only this process knows how to do."""

    def __init__(
        self,
        config: Config,
        machines: Mapping[PipelineName, PipelineControl],
        journal: Journal,
        clock: Clock,
        lines: JsonLines,
        lag: LagMonitor,
    ) -> None:
        self._pool = PoolHost(config, devices_of(config), machines, journal, self._now)
        self._fleets = {
            name: fleet_of(name, one.weights, partial(self._wake, name))
            for name, one in ((PipelineName(one.name), one) for one in config.pipeline)
        }
        calls = FleetCalls(self._fleets, machines, lambda: self.waiting, self._now)
        super().__init__(
            machines,
            journal,
            clock,
            on_instruction=self._instructed,
            answerers=self._pool.answerers | calls.answerers,
            neighbours={POOL: self._pool},
            is_steady=lambda name, member, version: self._fleets[name].is_steady(member, version),
            snapshot_every=config.journal.snapshot_every_events,
        )
        self._machines = machines
        self._wanted = {name: machine.settings for name, machine in machines.items()}
        self.prefetch: Mapping[PipelineName, bool] = {}
        """What workers are told with every lease; nothing of a pipeline: they do what they were started with."""
        self._lines = lines
        self._lag = lag
        self._evicted: dict[MemberId, str] = {}
        """Members that must be gone: whoever started them makes sure of it."""
        self._written: dict[PipelineName, int] = {}
        self._dropped: dict[PipelineName, tuple[int, int]] = {}
        self._discards = Discards()

    def start(self, *, new_session: bool, lines_on_file: Iterable[bytes] = ()) -> int:
        """Replays the journal and takes up the work; returns how many events lie behind.

        Lines of steps and evaluations that the journal knows and `lines_on_file` lacks are written again: a killed
        controller takes those along that its writer had not got to.

        In a new session of the run none of the former processes is left; after a mere restart all of them are.
        """
        replayed = self.recover()
        resumed = bool(replayed) and new_session
        if resumed:
            for name in self.pipelines:
                self.happen(name, RunResumed())
        new_life = not replayed or new_session
        if new_life:  # a mere restart goes on by what it had
            self._take_settings()
        self._pool.open(new_life=new_life)
        on_file = entries_in(lines_on_file) if replayed else set()
        for name, machine in self._machines.items():
            for summary in machine.state.recent:
                if (name, "step", summary.step) not in on_file:
                    self._write_line(name, summary, {})
            for result in machine.state.evaluation.results:
                if (name, "evaluation", result.due) not in on_file:
                    self._write_evaluation(name, result)
            if machine.weights is not None:
                self._tell_fleet(name, weights.VersionPublished(machine.weights))
        return replayed

    def _take_settings(self) -> None:
        for name, wanted in self._wanted.items():
            answer = self.happen(name, SettingsTaken(wanted))[0]
            if isinstance(answer, Refused):
                raise ConfigError(f"pipeline {name!r} of this run cannot go on so: {answer.message}")

    async def call(self, request: Request) -> Reply:
        if isinstance(request, AskLease) and (verdict := self._held_back(request)) is not None:
            return verdict
        if isinstance(request, OF_MEMBERS) and (refusal := self._refusal(request)) is not None:
            return refusal
        if isinstance(request, messages.Unregister):  # who leaves is off its devices, who is reported dead is gone
            self._pool.lost(request.member, request.reason)
        reply = await super().call(request)
        match request, reply:
            case AskLease(), Leased():
                return self._with_discards(request, reply)
            case AckStep(), Ok():
                self._write_step(request)
            case messages.Register(), messages.Registered():
                self._pool.registered(request)
            case messages.Heartbeat(), messages.HeartbeatSeen(known=True):
                self._pool.beaten(request)
            case messages.AckCheckpoint(), Ok():
                digest = self._machines[request.pipeline].state.digests.get(Version(request.step))
                if digest is not None:
                    self._tell_fleet(request.pipeline, weights.VersionMadeDurable(Held(Version(request.step), digest)))
            case messages.PublishWeights(), Ok():
                self._tell_fleet(request.pipeline, weights.VersionPublished(request.manifest, request.durable))
            case messages.ReportReplica(), Ok():
                self._tell_fleet(request.pipeline, reported(request))
                if self._machines[request.pipeline].evaluation.lacks_evaluator:
                    self._wake(request.pipeline, "leases")
        return reply

    def close(self) -> None:
        super().close()
        self._pool.waiting.close()

    def tick(self) -> None:
        """To be called a few times a second: demand for devices, replicas that are gone, deadlines."""
        self._pool.tick()
        for name, machine in self._machines.items():
            self._fleets[name].reconcile(*machine.attendance(), self._now())
            self._tell_fleet(name, weights.Ticked())

    def status(self) -> dict[str, Any]:
        status = super().status()
        for name, fleet in self._fleets.items():
            status["pipelines"][name] |= fleet.transaction.metrics()
        return status | {
            "lag": self._lag.report().values(prefix=""),
            "evicted": self._evicted | self._pool.fenced,
            "pool": msgspec.to_builtins(self._pool.pool.status(self._now())),
        }

    def _refusal(self, request: Request) -> Refused | None:
        """What one who was given up still says of its weights must not be believed."""
        machine = self._machines.get(request.pipeline)
        if machine is None or machine.members.get(request.member) is not None:
            return None
        return Refused("Stale", machine.members.why_unknown(request.member))

    def diagnosis(self) -> dict[str, str]:
        sentences = super().diagnosis()
        for name, trouble in self._pool.troubles().items():
            sentences[name] += f" In the pool: {trouble}."
        return sentences

    def _held_back(self, request: AskLease) -> Leased | None:
        """A replica that may not serve, or a fleet without weights, is given nothing."""
        fleet = self._fleets.get(request.pipeline)
        verdict = fleet.holds_back(request.member) if fleet is not None else None
        if verdict is None:
            return None
        phase, prefetch = self._machines[request.pipeline].phase, self.prefetch.get(request.pipeline)
        return Leased((), verdict, phase, prefetch)

    def _tell_fleet(self, name: PipelineName, event: weights.TransactionEvent) -> None:
        self._fleets[name].tell(event, self._now())
        self._settle_fleet(name)

    def _wake(self, name: PipelineName, topic: str) -> None:
        self.waiting.wake(name, topic)

    def _settle_fleet(self, name: PipelineName) -> None:
        fleet = self._fleets[name]
        while fleet.evicted:
            member, reason = fleet.evicted.popitem()
            self.happen(name, messages.Unregister(name, member, reason, died=True))
        while fleet.dismissed:
            member, reason = fleet.dismissed.popitem()
            self._evicted[member] = reason
        if fleet.failure and not self.failure:
            self.happen(name, messages.Stop(name, MemberId(""), fleet.failure, failed=True))

    def _instructed(self, name: PipelineName, effect: Effect) -> None:
        if isinstance(effect, effects.ReleasePayloads):
            self._discards.add(effect.payloads)
        elif isinstance(effect, effects.NoteEvaluation):
            self._write_evaluation(name, effect.result)
        elif isinstance(effect, effects.EvictMember):
            self._evicted[effect.member] = effect.reason
            self._pool.given_up(effect.member, effect.reason)  # it may still be on its devices

    def _with_discards(self, request: AskLease, reply: Leased) -> Leased:
        machine = self._machines[request.pipeline]
        member = machine.members.get(request.member)
        discard = self._discards.answer(member.rings if member is not None else (), request.request)
        prefetch = self.prefetch.get(request.pipeline)
        return msgspec.structs.replace(reply, discard=discard, oldest=machine.oldest_trainable, prefetch=prefetch)

    def _write_step(self, request: AckStep) -> None:
        name, machine = request.pipeline, self._machines[request.pipeline]
        summary = next((step for step in reversed(machine.state.recent) if step.step == request.step), None)
        if summary is None or self._written.get(name) == request.step:
            return
        self._written[name] = request.step
        self._write_line(name, summary, request.metrics)

    def _write_line(self, name: PipelineName, summary: StepSummary, metrics: Mapping[str, float]) -> None:
        self._lines.write(
            {
                "kind": "step",
                "at": self._clock.now(),
                "pipeline": name,
                "step": summary.step,
                "reward": summary.reward_mean if summary.samples else None,
                "samples": summary.samples,
                "staleness_mean": summary.staleness_mean,
                "staleness_max": summary.staleness_max,
                **self._dropped_since(name),
                **metrics,
            }
        )

    def _dropped_since(self, name: PipelineName) -> dict[str, float]:
        """The finished samples that were dropped since the line before. Where they are longer than the trained ones,
        dropping what is outdated shortens what is learned."""
        table = self._machines[name].state.ledger
        count, length = self._dropped.get(name, (0, 0))
        self._dropped[name] = (table.dropped_finished, table.dropped_length)
        dropped = table.dropped_finished - count
        mean = {"dropped_length_mean": (table.dropped_length - length) / dropped} if dropped > 0 else {}
        return {"dropped": dropped, **mean}

    def _write_evaluation(self, name: PipelineName, result: EvaluationResult) -> None:
        line = {"kind": "evaluation", "at": self._clock.now(), "pipeline": name, "due": result.due}
        line |= {"version": result.version, "took_s": result.took_s}
        if result.skipped:
            self._lines.write(line | {"skipped": result.skipped})
            return
        figures = {
            "eval/reward": result.reward_mean,
            "eval/reward_stderr": result.reward_stderr,
            "eval/count": result.samples,
            "eval/failed": result.failed,
            "eval/length": result.length_mean,
        }
        self._lines.write(line | figures)


def entries_in(lines: Iterable[bytes]) -> set[tuple[str, str, int]]:
    """The steps and evaluations that have a line, by pipeline and kind; a torn last line counts as none."""
    found: set[tuple[str, str, int]] = set()
    for line in lines:
        if b'"kind":"step"' not in line and b'"kind":"evaluation"' not in line:
            continue
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if entry.get("kind") == "step":
            found.add((entry["pipeline"], "step", entry["step"]))
        elif entry.get("kind") == "evaluation":
            found.add((entry["pipeline"], "evaluation", entry["due"]))
    return found
