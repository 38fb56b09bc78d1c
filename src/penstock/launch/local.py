"""The supervisor: starts the processes of a run on this machine, watches them, and ends every one of them.

Children die with the supervisor (each asks the kernel for that first of all), so a killed supervisor leaves nothing
behind but a run directory, and `--resume` goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from penstock.config.run import Config
from penstock.control.io.client import ControlClient
from penstock.errors import ConfigError, PenstockError, RunFailed
from penstock.launch.ending import judge, judge_last_words
from penstock.launch.restarts import FailTheRun, Finished, RestartAfter, RestartPolicy, describe_exit
from penstock.launch.view import loops_of
from penstock.payload.io.leftovers import sweep, sweep_dead
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.lag import LagMonitor
from penstock.runtime.process import kill_tree
from penstock.runtime.rundir import RunDir
from penstock.runtime.shutdown import ShutdownSignal
from penstock.runtime.tasks import Tasks
from penstock.wire.messages import Unregister

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
REPORT_DEATH_S = 2.0
EVICTED_GRACE_S = 3.0


class View(Protocol):
    """Shows a run to a person."""

    def update(self, status: dict[str, Any]) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the run. `wave` orders the end: lower waves are told to stop first.

    The run goes on without one that is not `vital`.
    """

    name: str
    role: str
    arguments: tuple[str, ...]
    threads: int
    pipeline: str | None = None
    wave: int = 0
    vital: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for the summary."""

    status: dict[str, Any]
    interrupted: bool
    wall_s: float


def processes_of(config: Config) -> list[ProcessSpec]:
    """All processes besides the controller."""
    specs = []
    for pipeline in config.pipeline:
        specs.append(
            ProcessSpec(
                f"{pipeline.name}.trainer",
                "trainer",
                ("--pipeline", pipeline.name),
                pipeline.train.threads,
                pipeline.name,
            )
        )
        for index in range(pipeline.rollout.workers):
            specs.append(
                ProcessSpec(
                    f"{pipeline.name}.rollout.{index}",
                    "rollout_worker",
                    ("--pipeline", pipeline.name, "--index", str(index)),
                    pipeline.rollout.threads,
                    pipeline.name,
                )
            )
    for index, sink in enumerate(config.metrics.sinks):
        arguments = ("--index", str(index))
        specs.append(ProcessSpec(f"sink.{sink}", "metrics_sink", arguments, threads=1, wave=2, vital=False))
    return specs


CONTROLLER = ProcessSpec("controller", "controller", (), 1, wave=1)


class Supervisor:
    """Runs one run directory to its end.

    Consumes: exit codes, the controller's status, signals. Produces: processes, restarts, the view's updates.
    Waits for: every pipeline to be complete. Unblocked by: completion, a failure, SIGINT or SIGTERM.
    """

    def __init__(self, run: RunDir, config: Config, view: View, stop: ShutdownSignal) -> None:
        self._run = run
        self._config = config
        self._view = view
        self._stop = stop
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._members: dict[str, str] = {}
        self._evicted_since: dict[str, float] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._ended_well: set[str] = set()
        self._status: dict[str, Any] = {}
        self._failure: PenstockError | None = None
        self._session = secrets.token_hex(8)
        self._lag = LagMonitor("supervisor", **config.lag.model_dump())
        self._loops: dict[str, dict[str, float]] = {}
        """The last figures of every loop: a process that leaves takes its own along."""
        self._over = asyncio.Event()

    async def run(self) -> Outcome:
        """Returns when training is complete or was interrupted; otherwise raises one sentence that says why."""
        started = time.monotonic()
        removed = [*sweep(self._run.run_id), *sweep_dead()]
        if removed:
            log.info("removed %d shared-memory rings that dead runs had left", len(removed))
        self._run.endpoint_path.unlink(missing_ok=True)
        try:
            async with Tasks() as tasks:
                for spec in [CONTROLLER, *processes_of(self._config)]:
                    self._specs[spec.name] = spec
                    tasks.spawn(f"keep {spec.name}", self._keep(spec))
                tasks.spawn("watch the controller", self._watch())
                tasks.spawn("wait for a signal", self._heed_signals())
                tasks.spawn("watch the loop", self._lag.run())
                await self._over.wait()
                await self._end_all()
                tasks.cancel()
        finally:
            await self._kill_leftovers()
            sweep(self._run.run_id)
            self._view.close()
        if self._failure is not None:
            raise self._failure
        status = self._status | {"loops": self._loops}
        return Outcome(status, self._stop.requested, time.monotonic() - started)

    async def _keep(self, spec: ProcessSpec) -> None:
        """Keeps one process running until it ends well or its policy gives up."""
        policy = RestartPolicy(spec.name, self._config.run.max_restarts)
        while not self._over.is_set():
            self._run.failure_path(spec.name).unlink(missing_ok=True)
            began = time.monotonic()
            member = f"{spec.name}-{secrets.token_hex(4)}"
            exit_code = await self._start_and_wait(spec, member)
            if self._over.is_set():
                return
            if exit_code != 0 and spec.pipeline is not None:
                await self._report_death(spec.pipeline, member, describe_exit(exit_code, None))
            match policy.ended(exit_code, time.monotonic() - began, self._run.read_failure(spec.name)):
                case Finished():
                    self._ended_well.add(spec.name)
                    log.info("%s finished", spec.name)
                    return
                case FailTheRun(sentence, mistake) if spec.vital:
                    self._fail(sentence, mistake)
                    return
                case FailTheRun(sentence):
                    self._view.note(f"{spec.name} is given up: {sentence.splitlines()[0]}")
                    log.warning("%s is given up, the run goes on without it: %s", spec.name, sentence)
                    return
                case RestartAfter(delay_s, why):
                    self._view.note(f"{spec.name} ended ({why}); starting it again in {delay_s:g} s")
                    log.warning("%s ended (%s); starting it again in %g s", spec.name, why, delay_s)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), delay_s)

    async def _report_death(self, pipeline: str, member: str, why: str) -> None:
        """The controller would notice by the silence; told, it issues the leases again at once."""
        died = Unregister(PipelineName(pipeline), MemberId(member), reason=why, died=True)
        client = ControlClient(self._run.endpoint_path, self._run.token(), died.pipeline, died.member)
        try:
            await client.call(died, timeout_s=REPORT_DEATH_S)
        except PenstockError as error:
            log.info("the controller could not be told that %s ended: %s", member, error)
        finally:
            await client.close()

    async def _start_and_wait(self, spec: ProcessSpec, member: str) -> int:
        threads = str(spec.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(
                [*(str(path) for path in self._config.run.extra_path), os.environ.get("PYTHONPATH", "")]
            ).strip(os.pathsep),
        }
        with self._run.log_path(spec.name).open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "penstock.roles", spec.role, str(self._run.root)),
                *("--name", spec.name, "--member", member, "--session", self._session, "--parent", str(os.getpid())),
                *spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._children[spec.name] = child
        self._members[spec.name] = member
        log.info("started %s as process %d", spec.name, child.pid)
        return await child.wait()

    async def _watch(self) -> None:
        """Asks the controller for the run's status and notices completion."""
        headers = {"authorization": f"Bearer {self._run.token()}"}
        stall_s = self._config.control.stall_after_s
        async with httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False) as client:
            while not self._over.is_set():
                endpoint = self._run.read_endpoint()
                if endpoint is not None:
                    try:
                        reply = await client.get(f"{endpoint.url}/v1/status")
                        reply.raise_for_status()
                        self._status = reply.json() | {"supervisor": self._lag.report().values()}
                        self._loops |= loops_of(self._status)
                        if any(one["stalled_s"] > stall_s for one in self._status["pipelines"].values()):
                            sentences = (await client.get(f"{endpoint.url}/v1/diagnosis")).json()
                            for name, one in self._status["pipelines"].items():
                                one["diagnosis"] = sentences[name]
                        self._view.update(self._status)
                        self._kill_evicted()
                    except httpx.HTTPError as error:
                        log.debug("no status from the controller at present: %s", error)
                match judge(self._status, self._trainers(), self._ended_well):
                    case Finished():
                        self._over.set()
                    case FailTheRun(sentence, mistake):
                        self._fail(sentence, mistake)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), STATUS_EVERY_S)

    def _kill_evicted(self) -> None:
        """Whoever was given up by the controller and has not left by itself is ended, so that it can be replaced."""
        for name, member in self._members.items():
            if member not in self._status.get("evicted", {}):
                continue
            since = self._evicted_since.setdefault(member, time.monotonic())
            child = self._children[name]
            if child.returncode is None and time.monotonic() - since > EVICTED_GRACE_S:
                log.warning("killing %s: %s", member, self._status["evicted"][member])
                with contextlib.suppress(ProcessLookupError):
                    child.kill()

    def _trainers(self) -> list[str]:
        return [name for name, spec in self._specs.items() if spec.role == "trainer"]

    async def _heed_signals(self) -> None:
        await self._stop.wait()
        self._view.note("stopping: finishing what is in flight (once more to kill)")
        self._over.set()

    def _fail(self, sentence: str, mistake: bool) -> None:
        """The first failure is the run's; later ones are mostly its consequences."""
        if self._failure is None:
            self._failure = ConfigError(sentence) if mistake else RunFailed(sentence)
        self._over.set()

    async def _end_all(self) -> None:
        """Asks workers and trainers first, the controller, then who sends its metrics; each wave for a bounded time."""
        for wave in (0, 1, 2):
            names = [name for name, child in self._children.items() if child.returncode is None]
            names = [name for name in names if self._specs[name].wave == wave]
            for name in names:
                with contextlib.suppress(ProcessLookupError):
                    self._children[name].send_signal(signal.SIGTERM)
            if not names:
                continue
            waits = [self._children[name].wait() for name in names]
            try:
                await asyncio.wait_for(asyncio.gather(*waits), self._config.run.grace_s)
            except TimeoutError:
                late = [name for name in names if self._children[name].returncode is None]
                log.warning("did not end within %g s and will be killed: %s", self._config.run.grace_s, ", ".join(late))
        keepers = [*self._trainers(), CONTROLLER.name]  # what they failed to write at the end is lost
        failed = judge_last_words({name: self._run.read_failure(name) for name in keepers})
        if failed is not None:
            self._fail(failed.sentence, failed.mistake)

    async def _kill_leftovers(self) -> None:
        for child in self._children.values():
            if child.returncode is None:
                await asyncio.to_thread(kill_tree, child.pid, 5.0)


@contextlib.contextmanager
def exclusive(run: RunDir) -> Iterator[None]:
    """Holds the run directory for one supervisor; the kernel lets go when this process dies, however it dies."""
    with (run.root / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run.root} is being run by another process; stop that one first") from None
        lock.write(str(os.getpid()))
        lock.flush()
        yield
