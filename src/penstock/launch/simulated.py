"""A simulated run under the real supervisor, with its restarts and its verdict on the run."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from penstock.control.io.client import ControlClient
from penstock.control.io.memory import MemoryClient
from penstock.errors import InvalidTransition, PeerLost, PenstockError, RunFailed
from penstock.launch.processes import ProcessSpec
from penstock.launch.restarts import Ended
from penstock.launch.supervisor import Outcome, Supervisor
from penstock.payload.io.mapping import Mapping
from penstock.payload.slot import STATE_MASK, SlotState
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.shutdown import ShutdownSignal
from penstock.sim.estimate import Capacity, estimate
from penstock.sim.loop import Process
from penstock.sim.plan import Plan, Report, as_test, config_of, mixed, trainers_of, workers_of
from penstock.sim.replay import replayed
from penstock.sim.scenarios import SCENARIOS, Result, Scenario, judged, scenario_called, scenarios_in
from penstock.sim.storms import KINDS, Fault, storm
from penstock.sim.system import TIMED, NoLag, Placed, System, simulated_system
from penstock.sim.waits import Waits

CHECK_EVERY_S = 1.0
WAITS_EVERY_S = 10.0
UNBOUNDED_FOR_S = 90.0
"""A wait without a deadline that has lasted for this long, and is in no diagnosis, counts as indefinite."""
RECOVERS_WITHIN_S = 120.0
"""Every pipeline must train again within this time after the end of the last fault."""
STALL_SLACK_S = 20.0
"""Beyond `control.stall_after_s`, for the controller to detect and log the stall."""

STARTS_A_MINUTE = 10
"""Limit for one process under one supervisor: the backoff is 0.5, 1, 2, 4, 8, then 10 s, however soon it dies."""

STARTS_TOO_EARLY = re.compile(r"(?P<pipeline>\S+)\.trainer: the trainer starts at step \d+, but .* was confirmed")
DISK_IS_FULL = ("the disk is full", "No space left on device")
RESUME = "resume the run"


def simulate(plan: Plan) -> Report:
    """Simulates the run until it ends. Raises `InvalidTransition` with the invariant that was violated."""
    began = time.perf_counter()
    with simulated_system(config_of(plan), plan.work, plan.seed, real_limit_s=plan.real_limit_s) as system:
        run = _Run(system, plan)
        ended = system.loop.run_until_complete(run.run_to_end())
        truth = system.truth
        report = Report(
            plan=plan,
            ended=ended,
            virtual_s=system.loop.time(),
            real_s=time.perf_counter() - began,
            steps=dict(truth.steps_at),
            samples=truth.samples_trained,
            trained_s=truth.trained_s,
            generated_s=truth.generated_s,
            calls=system.network.calls,
            staleness=dict(sorted(truth.staleness.items())),
            refused=dict(truth.refused),
            restarts=system.starts,
            digest=system.history.digest(),
            log_lines=system.log_lines,
            lines=list(system.history.lines),
            broken=truth.broken,
            points=list(truth.points.values()),
            troubles=dict(system.payload_net.troubles),
            turns=truth.turns,
            fired=dict(run.fired),
            status=run.status,
            lost=system.disk.lost,
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
        self.plan_stall_s = system.config.control.stall_after_s
        self._up_since = 0.0
        self._waits = Waits(system.loop)
        self._waits_at = WAITS_EVERY_S
        self._calm_at = max((one.at_s + one.for_s for one in plan.faults), default=0.0) + RECOVERS_WITHIN_S
        self._pause_s = 60.0 + 4 * sum(getattr(plan.work, name) for name in {"sample_s", *TIMED.values()})
        """Upper bound of a step without faults."""

    async def run_to_end(self) -> str:
        system, plan = self.system, self.plan
        for one in plan.faults:
            system.loop.call_later(one.at_s, self._inject, one)
        watching = system.loop.create_task(self._watch())
        incarnations = itertools.count()
        while True:
            home = Process(system.loop, "supervisor")
            supervisor = SimulatedSupervisor(system, home, f"{plan.seed} {next(incarnations)}")
            running = home.run(supervisor.run())
            system.outage = system.loop.create_future()
            done, _ = await asyncio.wait(
                [running, watching, system.broken, system.outage],
                timeout=plan.limit_s - system.loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if system.outage in done:
                home.kill()
                await asyncio.sleep(system.outage.result())
            elif running in done and plan.resumed and _is_resumable(running.exception()):
                while system.conditions.disk_full:  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(CHECK_EVERY_S)
            else:
                break
        self.status = supervisor.status
        watching.cancel()
        if running in done:
            try:
                running.result()
            except PenstockError as error:
                self._check_failure(str(error))
                return str(error)
            self._check_end()
            return "complete"
        if watching in done:
            watching.result()
        if system.broken in done:
            return "an invariant was violated"
        stalls = "; ".join(system.service.diagnosis().values()) if system.service is not None else "no controller"
        raise RunFailed(
            f"seed {plan.seed}: not complete after {plan.limit_s:g} s: {stalls}\n{system.loop.waits()}\n"
            + "\n".join(list(system.history.lines)[-30:])
        )

    def _inject(self, one: Fault) -> None:
        self.fired[one.what] += 1
        self.system.history.add(f"fault {one}")
        undo = KINDS[one.what](self.system, one)
        if undo is not None and one.for_s:
            self.system.loop.call_later(one.for_s, undo)

    async def _watch(self) -> None:
        """Checks the sample tables continuously, and that the controller reports every stall within its bound."""
        system, allowed_s = self.system, self.plan_stall_s + STALL_SLACK_S
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if system.service is None:
                continue
            system.service.check()
            now, server = system.loop.time(), system.network.server
            up_for_s = now - server.started_at if server is not None and server.state == "running" else 0.0
            self._up_since = min(self._up_since, now) if up_for_s else now
            if now >= self._waits_at:
                self._waits_at = now + WAITS_EVERY_S
                self._check_waits(now - allowed_s)
            for pipeline, moved_at in system.truth.moved_at.items():
                self._check_recovery(pipeline, now)
                quiet_s = now - max(moved_at, self._up_since, server.started_at if server is not None else now)
                if quiet_s > allowed_s and not self._diagnosed(pipeline, now - allowed_s):
                    system.truth.violated(
                        f"{pipeline} stalled for {quiet_s:.0f} s and the controller did not report it"
                    )

    def _check_waits(self, since: float) -> None:
        for process, place, waited_s in self._waits.unbounded(UNBOUNDED_FOR_S):
            if not self._logged("stalled for", since, process):
                self.system.truth.violated(
                    f"{process}: {place} has waited for {waited_s:.0f} s without a deadline\n{self.system.loop.waits()}"
                )

    def _check_recovery(self, pipeline: str, now: float) -> None:
        """Checks that a pipeline trains again within its bound after the last fault, and does not stop after that."""
        idle_s = now - max(self._calm_at, self.system.truth.stepped_at.get(pipeline, 0.0))
        if idle_s > self._pause_s and self._phase(pipeline) == "running":
            ago_s = now - self._calm_at + RECOVERS_WITHIN_S
            self.system.truth.violated(f"{pipeline} trains no step, {ago_s:.0f} s after the end of the last fault")

    def _phase(self, pipeline: str) -> str:
        service = self.system.service
        return service.controller.pipelines[PipelineName(pipeline)].phase if service is not None else ""

    def _diagnosed(self, pipeline: str, since: float) -> bool:
        """Whether the controller logged the stall, or the pipeline is in a phase without progress."""
        return self._logged(f"{pipeline}: stalled for", since) or self._phase(pipeline) not in ("running", "draining")

    def _logged(self, text: str, since: float, name: str = "") -> bool:
        return any(
            one.at >= since and one.process == "controller" and text in one.line and name in one.line
            for one in reversed(self.system.log_lines[-200:])
        )

    def _check_failure(self, sentence: str) -> None:
        """Checks that a run failed for want of a checkpoint only because every one it kept was lost."""
        found = STARTS_TOO_EARLY.search(sentence)
        if found is None or self.fired["damage_checkpoint"]:
            return
        kept, lost = self.system.kept_checkpoints(found["pipeline"])
        if not kept or kept != lost:
            self.system.truth.violated(f"{sentence}; {kept} were kept, and only {lost} of them were lost")

    def _check_end(self) -> None:
        system = self.system
        again = replayed(system.run.journal_path, system.config)
        if again.problem:
            system.truth.violated(again.problem)
        for pipeline in system.config.pipeline:
            learner = system.learners[pipeline.name]
            system.truth.check_end(pipeline.name, self.status["pipelines"][pipeline.name], learner.trained)
            system.truth.check_points(pipeline.name, learner.steps)
            batch = pipeline.train.groups_per_step * pipeline.rollout.group_size
            bound = (pipeline.train.max_staleness + 3) * batch + 4 * pipeline.rollout.batch_samples
            for placed in system.placed.values():
                if placed.member.pipeline_name == pipeline.name:
                    _check_rings(system, placed, bound)


def _is_resumable(error: BaseException | None) -> bool:
    """Whether the error advises the user to resume the run once the disk has free space."""
    return isinstance(error, PenstockError) and any(text in str(error) for text in (*DISK_IS_FULL, RESUME))


def _check_rings(system: System, placed: Placed, bound: int) -> None:
    """Checks that payloads that were trained, refused or dropped have left their ring."""
    for path in placed.rings:
        if not path.exists():
            continue
        mapping = Mapping.open(path.name, str(path.parent))
        states = Counter(int(word) & STATE_MASK for word in mapping.word_array)
        mapping.close()
        used = states[SlotState.READY] + states[SlotState.READING] + states[SlotState.WRITING]
        if used > bound:
            system.truth.violated(
                f"{placed.process.name}: {used} slots are in use at the end, expected at most {bound}"
            )


class SimulatedSupervisor(Supervisor):
    """The real supervisor; only its connection to the controller is simulated."""

    def __init__(self, system: System, home: Process, seed: str) -> None:
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

    async def _page(self, name: str) -> dict[str, Any]:
        service, server = self._system.service, self._system.network.server
        if service is None or server is None or server.state != "running":
            raise PeerLost("there is no controller at present")
        return msgspec.to_builtins(service.status() if name == "status" else service.diagnosis())

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
        self._started: defaultdict[str, list[float]] = defaultdict(list)

    async def open(self) -> None:
        pass

    async def place(self, spec: ProcessSpec, member: str, session: str) -> _PlacedProcess:
        now, started = self._system.loop.time(), self._started[spec.name]
        started.append(now)
        if len(recent := [at for at in started if now - at < 60.0]) > STARTS_A_MINUTE:
            self._system.truth.violated(f"{spec.name} was started {len(recent)} times in a minute")
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

    def terminate(self) -> None:
        member = self._placed.member
        asyncio.get_running_loop().call_soon(
            member.stop.request, "received SIGTERM", context=self._placed.process.context
        )

    def kill(self) -> None:
        self._placed.process.kill()

    async def kill_tree(self, timeout_s: float) -> None:
        self.kill()


def attempted(plan: Plan) -> tuple[str, Report | None]:
    """Why this run failed (empty if it did not), and its report, if it has one."""
    try:
        report = simulate(plan)
    except (InvalidTransition, RunFailed) as error:
        return str(error), None
    return ("" if report.acceptable else report.ended), report


def stormy(plan: Plan, seed: int, intensity: float) -> Plan:
    """The plan with a storm of this seed; an intensity of 1 is a fault about every eight seconds."""
    if not intensity:
        return msgspec.structs.replace(plan, seed=seed)
    span_s, every_s = 2.0 * plan.steps, 8.0 / intensity
    faults = storm(seed, workers_of(plan), trainers_of(plan), span_s=span_s, every_s=every_s)
    return msgspec.structs.replace(plan, seed=seed, faults=tuple(faults))


def scenarios_called(name: str) -> list[Scenario]:
    """One scenario by its name, all of them, or those of a file."""
    if name == "all":
        return SCENARIOS
    return scenarios_in(Path(name)) if name.endswith((".py", ".toml")) else [scenario_called(name)]


def run_scenario(scenario: Scenario) -> Result:
    return judged(scenario, simulate(scenario.plan))


def capacity(config: Path, run: Path | None) -> list[Capacity]:
    return estimate(config, run, simulate)


def plot_capacity(found: Sequence[Capacity], path: Path) -> None:
    """Samples/s and idle shares over the number of workers, a row for each pipeline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(len(found), 2, figsize=(9.6, 3.4 * len(found)), squeeze=False, layout="constrained")
    for (pace, idle), one in zip(rows, found, strict=True):
        for (bound, points), colour in zip(one.curves.items(), ("#08519c", "#9ecae1"), strict=True):
            workers, label = [point.workers for point in points], f"max_staleness = {bound}"
            pace.plot(workers, [point.samples_per_s for point in points], "o-", color=colour, markersize=3, label=label)
        configured, points = one.configured, one.curves[one.configured.max_staleness]
        pace.plot(configured.workers, configured.samples_per_s, "o", color="#d94801", label="as configured")
        workers = [point.workers for point in points]
        idle.plot(workers, [100 * point.trainer_idle for point in points], "o-", color="#238b45", label="trainer")
        idle.plot(workers, [100 * point.workers_idle for point in points], "o-", color="#756bb1", label="workers")
        idle.axvline(configured.workers, color="#d94801", linewidth=1, linestyle=":")
        pace.set_ylabel("samples/s")
        idle.set_ylabel("idle, % of the time")
        idle.set_ylim(0, 100)
        pace.set_ylim(bottom=0)
        for axis in (pace, idle):
            axis.set_title(one.pipeline)
            axis.set_xlabel("rollout workers")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def minimised(plan: Plan, *, tries: int = 60) -> Plan:
    """The smallest plan found that still fails: fewer faults first, then fewer steps."""
    size = max(1, len(plan.faults) // 2)
    while tries > 0 and plan.faults:
        for start in range(0, len(plan.faults), size):
            tries -= 1
            fewer = msgspec.structs.replace(plan, faults=plan.faults[:start] + plan.faults[start + size :])
            if attempted(fewer)[0]:
                plan = fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    while plan.steps > 1 and tries > 0:
        tries -= 1
        shorter = msgspec.structs.replace(plan, steps=plan.steps // 2)
        if not attempted(shorter)[0]:
            break
        plan = shorter
    return plan


__all__ = [
    "Capacity",
    "Plan",
    "Report",
    "Result",
    "as_test",
    "attempted",
    "capacity",
    "minimised",
    "mixed",
    "plot_capacity",
    "run_scenario",
    "scenarios_called",
    "simulate",
    "stormy",
]
