"""A simulated run under the real supervisor: its restarts, its judgement of how the run ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from random import Random
from typing import Any

import msgspec

from penstock.config.run import Config
from penstock.control.io.client import ControlClient
from penstock.control.io.memory import MemoryClient
from penstock.errors import InvalidTransition, PenstockError, RunFailed
from penstock.launch.processes import ProcessSpec
from penstock.launch.restarts import Ended
from penstock.launch.supervisor import Outcome, Supervisor
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.shutdown import ShutdownSignal
from penstock.sim.loop import Process
from penstock.sim.parts import Work
from penstock.sim.storms import KINDS, Fault
from penstock.sim.system import NoLag, Placed, System, simulated_system

CHECK_EVERY_S = 1.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run: everything follows from it."""

    seed: int = 0
    steps: int = 20
    workers: int = 2
    pipelines: int = 1
    groups_per_step: int = 4
    group_size: int = 2
    max_staleness: int = 2
    work: Work = Work()
    faults: tuple[Fault, ...] = ()
    settings: dict[str, Any] = {}
    """Of the configuration, by dotted name: `control.stall_after_s`, `pipeline.rollout.ring_slots`."""
    limit_s: float = 3600.0
    """Virtual seconds after which the run counts as stuck."""
    real_limit_s: float = 300.0


class Report(msgspec.Struct, kw_only=True):
    """What became of a simulated run."""

    plan: Plan
    ended: str
    """`complete`, or the sentence with which it failed."""
    virtual_s: float
    real_s: float
    steps: dict[str, list[float]]
    """When each step was done, by pipeline."""
    samples: int
    calls: int
    staleness: dict[int, int]
    refused: dict[str, int]
    restarts: int
    digest: str
    """Of the whole history."""
    said: list[Any]
    lines: list[str]
    broken: list[str]
    fired: dict[str, int]
    status: dict[str, Any]

    @property
    def complete(self) -> bool:
        return self.ended == "complete"

    def first_said(self, words: str, after_s: float = 0.0) -> float | None:
        """When a log line with these words was first written."""
        return next((one.at for one in self.said if words in one.line and one.at >= after_s), None)


def config_of(plan: Plan) -> Config:
    """A configuration as a user would write it, for a model that is simulated."""
    tables = [
        {
            "name": f"p{number}",
            "steps": plan.steps,
            "env": {"name": "copy"},
            "model": {"kind": "tiny"},
            "rollout": {
                "workers": plan.workers,
                "group_size": plan.group_size,
                "batch_samples": 2 * plan.group_size,
                "ring_mb": 1,
                "ring_slots": 256,
                "device": "cpu",
            },
            "train": {
                "groups_per_step": plan.groups_per_step,
                "max_staleness": plan.max_staleness,
                "device": "cpu",
            },
            "weights": {"transport": "files"},
            "checkpoint": {"every_steps": 5},
            "samples": {"save_every_steps": 0},
        }
        for number in range(plan.pipelines)
    ]
    whole: dict[str, Any] = {"payload": {"transport": "shm"}, "pipeline": tables, "run": {"max_restarts": 1000}}
    for name, value in plan.settings.items():
        first, *rest = name.split(".")
        for table in tables if first == "pipeline" else [whole.setdefault(first, {})]:
            for part in rest[:-1]:
                table = table.setdefault(part, {})
            table[rest[-1]] = value
    return Config.model_validate(whole)


def simulate(plan: Plan) -> Report:
    """Runs it to its end. Raises `InvalidTransition` when a promise is broken, naming it."""
    began = time.perf_counter()
    with simulated_system(config_of(plan), plan.work, plan.seed, real_limit_s=plan.real_limit_s) as system:
        run = _Run(system, plan)
        ended = system.loop.run_until_complete(run.to_its_end())
        truth = system.truth
        report = Report(
            plan=plan,
            ended=ended,
            virtual_s=system.loop.time(),
            real_s=time.perf_counter() - began,
            steps=dict(truth.steps_at),
            samples=truth.samples_trained,
            calls=system.network.calls,
            staleness=dict(sorted(truth.staleness.items())),
            refused=dict(truth.refused),
            restarts=system.starts,
            digest=system.history.digest(),
            said=system.said,
            lines=list(system.history.lines),
            broken=truth.broken,
            fired=dict(run.fired),
            status=run.status,
        )
    if report.broken:
        raise InvalidTransition(f"seed {plan.seed}: {report.broken[0]}")
    return report


class _Run:
    def __init__(self, system: System, plan: Plan) -> None:
        self.system = system
        self.plan = plan
        self.fired: Counter[str] = Counter()
        self.status: dict[str, Any] = {}

    async def to_its_end(self) -> str:
        system, plan = self.system, self.plan
        for one in plan.faults:
            system.loop.call_later(one.at_s, self._strike, one)
        home = Process(system.loop, "supervisor")
        supervisor = SimulatedSupervisor(system, home, plan.seed)
        running = home.run(supervisor.run())
        watching = asyncio.create_task(self._watch())
        done, _ = await asyncio.wait(
            [running, watching, system.broken], timeout=plan.limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        self.status = supervisor.status
        watching.cancel()
        if running in done:
            try:
                running.result()
            except PenstockError as error:
                return str(error)
            self._check_end()
            return "complete"
        if watching in done:
            watching.result()
        if system.broken in done:
            return "a promise was broken"
        stalls = "; ".join(system.desk.diagnosis().values()) if system.desk is not None else "no controller"
        raise RunFailed(
            f"seed {plan.seed}: not over after {plan.limit_s:g} s: {stalls}\n{system.loop.waits()}\n"
            + "\n".join(list(system.history.lines)[-30:])
        )

    def _strike(self, one: Fault) -> None:
        self.fired[one.what] += 1
        self.system.history.add(f"fault {one}")
        undo = KINDS[one.what](self.system, one)
        if undo is not None and one.for_s:
            self.system.loop.call_later(one.for_s, undo)

    async def _watch(self) -> None:
        """The books are audited all the time."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self.system.desk is not None:
                self.system.desk.check()

    def _check_end(self) -> None:
        system = self.system
        for pipeline in system.config.pipeline:
            learner = system.learners[pipeline.name]
            system.truth.check_end(pipeline.name, self.status["pipelines"][pipeline.name], learner.trained)


class SimulatedSupervisor(Supervisor):
    """The supervisor itself; only its way to the controller is simulated."""

    def __init__(self, system: System, home: Process, seed: int) -> None:
        view: Any = _View()
        super().__init__(
            system.run, system.config, _Placer(system), view, ShutdownSignal(), Random(f"{seed} supervisor")
        )
        self._system = system
        self._home = home
        self._lag = NoLag("supervisor")

    @property
    def status(self) -> dict[str, Any]:
        return self._status

    async def _page(self, name: str) -> dict[str, Any] | None:
        desk, server = self._system.desk, self._system.network.server
        if desk is None or server is None or server.state != "running":
            return None
        return msgspec.to_builtins(desk.status() if name == "status" else desk.diagnosis())

    def _caller(self, pipeline: PipelineName, member: MemberId) -> ControlClient:
        return MemoryClient(self._system.network.link(self._home), pipeline, member)

    async def run(self) -> Outcome:
        return await super().run()


class _View:
    def update(self, status: dict[str, Any]) -> None:
        pass

    def note(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Placer:
    def __init__(self, system: System) -> None:
        self._system = system

    async def open(self) -> None:
        pass

    async def place(self, spec: ProcessSpec, member: str, session: str) -> _PlacedProcess:
        index = spec.arguments[spec.arguments.index("--index") + 1] if "--index" in spec.arguments else "0"
        placed = self._system.start(spec.role, spec.name, member, session, spec.pipeline or "", int(index))
        return _PlacedProcess(placed)

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass


class _PlacedProcess:
    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self.where = placed.process.name

    @property
    def running(self) -> bool:
        return not self._placed.ended.done()

    async def wait(self) -> Ended:
        return Ended(await asyncio.shield(self._placed.ended))

    def ask_to_end(self) -> None:
        member = self._placed.member
        asyncio.get_running_loop().call_soon(
            member.stop.request, "received SIGTERM", context=self._placed.process.context
        )

    def kill(self) -> None:
        self._placed.process.kill()

    async def kill_tree(self, timeout_s: float) -> None:
        self.kill()
