"""The supervisor: keeps the processes of a run running, detects the end of the run, and ends all processes.

It decides which process is started, when it is restarted, and how the run ended. Its placer starts, watches and ends a
process: launchers differ only in their placer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any, Protocol

from penstock.config.run import Config
from penstock.control.io.client import ControlClient
from penstock.errors import ConfigError, PeerLost, PenstockError, RunFailed, Transient, sentence_of
from penstock.launch.ending import judge, judge_failure_reports, judge_leaving
from penstock.launch.processes import CONTROLLER, ProcessSpec, processes_of
from penstock.launch.restarts import (
    Ended,
    FailTheRun,
    Finished,
    RestartAfter,
    RestartPolicy,
    Verdict,
    describe_exit,
    without_place,
)
from penstock.launch.view import Tolerated, View, loops_of
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.clock import monotonic
from penstock.runtime.following import Following
from penstock.runtime.lag import LagMonitor
from penstock.runtime.rundir import Ending, RunDir, write_atomically
from penstock.runtime.shutdown import ShutdownSignal
from penstock.runtime.tasks import Tasks
from penstock.train.best import keep_best
from penstock.wire.messages import Unregister

log = logging.getLogger(__name__)

SYSTEM_RANDOM = SystemRandom()
STATUS_EVERY_S = 0.5
PAGE_S = 5.0
REPORT_DEATH_S = 2.0
EVICTED_GRACE_S = 3.0
KILL_TREE_S = 5.0


class Placed(Protocol):
    """A process that was started. All methods may be called at any time, also after it has ended."""

    @property
    def where(self) -> str:
        """For log lines: the process, and its machine if that is not this one."""
        ...

    @property
    def running(self) -> bool: ...

    async def wait(self) -> Ended:
        """Waits until the process has ended. Several callers may wait."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    async def kill_tree(self, timeout_s: float) -> None:
        """Ends the process and its descendants."""
        ...


class Placer(Protocol):
    """Starts the processes of one run."""

    async def open(self) -> None:
        """Called before the first process: reserves resources for all, and removes leftovers of dead processes."""
        ...

    async def place(self, spec: ProcessSpec, member: str, session: str) -> Placed:
        """Starts a process. Raises `Transient` while there are no resources for it."""
        ...

    async def run(self) -> None:
        """Background work while processes are alive; runs until it is cancelled."""
        ...

    async def close(self) -> None:
        """Called after the last process: removes everything of the run except its directory."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, for the summary."""

    status: dict[str, Any]
    interrupted: bool
    wall_s: float


class Supervisor:
    """Runs one run directory to its end.

    Consumes: exit codes, the controller's status, signals. Produces: processes, restarts, the view's updates.
    Waits for: every pipeline to be complete. Unblocked by: completion, a failure, SIGINT or SIGTERM.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        placer: Placer,
        view: View,
        stop: ShutdownSignal,
        random: Random = SYSTEM_RANDOM,
    ) -> None:
        self._run = run
        self._config = config
        self._placer = placer
        self._view = Tolerated(view)
        self._stop = stop
        self._specs = {spec.name: spec for spec in processes_of(config)}
        self._placed: dict[str, Placed] = {}
        self._members: dict[str, str] = {}
        self._evicted_since: dict[str, float] = {}
        self._ended_well: set[str] = set()
        self._unreported: dict[MemberId, Unregister] = {}
        """Ends of processes that could not be reported to the controller yet."""
        self._status: dict[str, Any] = {}
        self._failure: PenstockError | None = None
        self._random = random
        self._session = random.randbytes(8).hex()
        self._lag = LagMonitor("supervisor", config.lag)
        self._loops: dict[str, dict[str, float]] = {}
        """The last figures of every loop; they are kept after the process has ended."""
        self._over = asyncio.Event()
        self._pages: ControlClient | None = None

    async def run(self) -> Outcome:
        """Returns when training is complete or was interrupted; raises a `PenstockError` if the run failed."""
        started = monotonic()
        self._run.endpoint_path.unlink(missing_ok=True)
        for report in (self._run.root / "failures").glob("*.json"):
            report.unlink(missing_ok=True)
        try:
            async with Tasks() as tasks:
                tasks.spawn("wait for a signal", self._wait_for_signal())
                tasks.spawn("watch the loop", self._lag.run())
                tasks.spawn("begin", self._begin(tasks))
                await self._over.wait()
                await self._end_all()
                tasks.cancel()
        finally:
            if self._pages is not None:
                await self._pages.close()
            await self._kill_leftovers()
            await self._placer.close()
            self._view.close()
        if self._failure is not None:
            raise self._failure
        status = self._status | {"loops": self._loops}
        return Outcome(status, self._stop.requested, monotonic() - started)

    async def _begin(self, tasks: Tasks) -> None:
        await self._placer.open()
        for spec in self._specs.values():
            tasks.spawn(f"keep {spec.name}", self._keep_running(spec))
        tasks.spawn("watch the controller", self._watch())
        tasks.spawn("serve the processes", self._placer.run())

    async def _keep_running(self, spec: ProcessSpec) -> None:
        """Keeps one process running until it completes or its policy stops restarting it."""
        run = self._config.run
        policy = RestartPolicy(spec.name, run.max_restarts, run.restart_window_s)
        while not self._over.is_set():
            match await self._run_once(spec, policy):
                case Finished():
                    self._ended_well.add(spec.name)
                    log.info("%s finished", spec.name)
                    return
                case FailTheRun(sentence, mistake) if spec.vital:
                    self._fail(sentence, mistake)
                    return
                case FailTheRun(sentence):
                    self._view.note(f"{spec.name} is not restarted: {sentence.splitlines()[0]}")
                    log.warning("%s is not restarted, the run continues without it: %s", spec.name, sentence)
                    return
                case RestartAfter(delay_s, why):
                    self._view.note(f"{spec.name} ended ({why}); starting it again in {delay_s:g} s")
                    log.warning("%s ended (%s); starting it again in %g s", spec.name, why, delay_s)
                    self._run.failure_path(spec.name).unlink(missing_ok=True)  # it is no failure of the run
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), delay_s)

    async def _run_once(self, spec: ProcessSpec, policy: RestartPolicy) -> Verdict | None:
        """Runs the process once and returns the verdict on its end; None if the run is ending anyway."""
        began = monotonic()
        member = f"{spec.name}-{self._random.randbytes(4).hex()}"
        try:
            placed = await self._placer.place(spec, member, self._session)
        except Transient as error:
            return without_place(spec, str(error), self._running_beside(spec))
        self._placed[spec.name], self._members[spec.name] = placed, member
        log.info("started %s as %s", spec.name, placed.where)
        ended = await placed.wait()
        if ended.exit_code == 0 and spec.pipeline is not None and not self._over.is_set():
            await self._poll_status()
            ended = judge_leaving(self._status, spec.pipeline, ended)
        if self._over.is_set():
            return None
        failure_report = self._run.read_failure(spec.name)
        if spec.pipeline is not None:  # also after exit code 0: only its end may have freed its devices
            await self._report_death(spec.pipeline, member, describe_exit(ended, None))
        now = monotonic()
        return policy.ended(ended, now - began, failure_report, now=now)

    def _running_beside(self, spec: ProcessSpec) -> list[str]:
        """Running processes with the same role and pipeline."""
        same = [name for name, one in self._specs.items() if (one.role, one.pipeline) == (spec.role, spec.pipeline)]
        return [name for name in same if name != spec.name and name in self._placed and self._placed[name].running]

    async def _report_death(self, pipeline: str, member: str, why: str) -> None:
        """Reports the end to the controller, which then reissues the leases at once instead of after missed heartbeats.
        If the controller does not answer, the report is repeated while the process is restarted."""
        died = Unregister(PipelineName(pipeline), MemberId(member), reason=why, died=True)
        if not await self._report(died):
            self._unreported[died.member] = died

    async def _report_again(self) -> None:
        for died in tuple(self._unreported.values()):
            if not await self._report(died):
                break
            self._unreported.pop(died.member, None)

    async def _report(self, died: Unregister) -> bool:
        client = self._caller(died.pipeline, died.member)
        try:
            await client.call(died, timeout_s=REPORT_DEATH_S)
        except PenstockError as error:
            log.info("the controller could not be notified that %s ended: %s", died.member, error)
            return False
        finally:
            await client.close()
        return True

    async def _watch(self) -> None:
        """Polls the controller for the run's status and detects completion."""
        while not self._over.is_set():
            if not self._run.in_place:
                self._fail(_directory_lost(self._run), mistake=False)
                break
            await self._poll_status()
            match judge(self._status, self._trainers(), self._ended_well):
                case Finished():
                    self._over.set()
                case FailTheRun(sentence, mistake):
                    self._fail(sentence, mistake)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), STATUS_EVERY_S)

    async def _poll_status(self) -> None:
        try:
            status = await self._page("status")
            self._status = status | {"supervisor": self._lag.report().values()}
            self._loops |= loops_of(self._status)
            for one in self._status["pipelines"].values():
                one["ending"] = self._over.is_set()
            stall_s = self._config.control.stall_after_s
            if any(one["stalled_s"] > stall_s for one in self._status["pipelines"].values()):
                sentences = await self._page("diagnosis")
                for name, one in self._status["pipelines"].items():
                    one["diagnosis"] = sentences.get(name, "")
            self._view.update(self._status)
            self._kill_evicted()
            await self._report_again()
        except PeerLost as error:
            log.debug("no status from the controller at present: %s", error)

    async def _page(self, name: str) -> dict[str, Any]:
        """Fetches a page from the controller. Raises `PeerLost` while there is no controller."""
        if self._pages is None:
            self._pages = self._caller(PipelineName(""), MemberId("supervisor"))
        return await self._pages.page(name, PAGE_S)

    def _caller(self, pipeline: PipelineName, member: MemberId) -> ControlClient:
        return ControlClient(self._run.endpoint_path, self._run.token(), pipeline, member)

    def _kill_evicted(self) -> None:
        """Kills an evicted process that has not ended within the grace period, so that it can be replaced."""
        for name, member in self._members.items():
            if member not in self._status.get("evicted", {}):
                continue
            since = self._evicted_since.setdefault(member, monotonic())
            if self._placed[name].running and monotonic() - since > EVICTED_GRACE_S:
                self._view.note(f"killing {member}: {self._status['evicted'][member]}")
                log.warning("killing %s: %s", member, self._status["evicted"][member])
                self._placed[name].kill()

    def _trainers(self) -> list[str]:
        return [name for name, spec in self._specs.items() if spec.role == "trainer"]

    async def _wait_for_signal(self) -> None:
        await self._stop.wait()
        self._view.note("stopping: finishing work in flight (signal again to kill)")
        self._over.set()

    def _fail(self, sentence: str, mistake: bool) -> None:
        """Records the first failure as that of the run; later ones are mostly its consequences."""
        if self._failure is None:
            self._failure = ConfigError(sentence) if mistake else RunFailed(sentence)
        self._over.set()

    async def _end_all(self) -> None:
        """Stops workers and trainers first, then the controller, then the metrics sinks; waits a bounded time for each.

        A second signal ends the wait: processes that have not ended by then are killed.
        """
        for wave in (0, 1, 2):
            if self._stop.insisted.is_set() or not self._run.in_place:  # there is no directory to write to
                break
            if wave == CONTROLLER.wave:  # it has the final figures of the others, for the summary
                await self._poll_status()
            names = [name for name, one in self._placed.items() if one.running and self._specs[name].wave == wave]
            for name in names:
                self._placed[name].terminate()
            if not names:
                continue
            await self._wait_for(names)
            if late := ", ".join(name for name in names if self._placed[name].running):
                waited = "at once" if self._stop.insisted.is_set() else f"within {self._config.run.grace_s:g} s"
                sentence = f"did not end {waited} and will be killed: {late}"
                self._view.note(sentence)
                log.warning(sentence)
        keepers = [*self._trainers(), CONTROLLER.name]  # if their last write failed, data is lost
        failed = judge_failure_reports({name: self._run.read_failure(name) for name in keepers})
        if failed is not None:
            self._fail(failed.sentence, failed.mistake)

    async def _wait_for(self, names: list[str]) -> None:
        """Waits until they have ended, the grace period has passed, or a second signal arrives."""

        async def all_ended() -> None:
            for name in names:
                await self._placed[name].wait()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(all_ended()), group.create_task(self._stop.insisted.wait())]
            await asyncio.wait(tasks, timeout=self._config.run.grace_s, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _kill_leftovers(self) -> None:
        async with asyncio.TaskGroup() as group:
            for placed in self._placed.values():
                if placed.running:
                    group.create_task(placed.kill_tree(KILL_TREE_S))


async def supervise(run: RunDir, config: Config, placer: Placer, view: View, stop: ShutdownSignal) -> Outcome:
    """Supervises the run until it ends, and writes its outcome to the run directory."""
    run.ending_path.unlink(missing_ok=True)
    try:
        outcome = await Supervisor(run, config, placer, view, stop).run()
    except Exception as error:
        if not run.in_place:  # then any other failure is a consequence
            raise RunFailed(_directory_lost(run)) from error
        if not isinstance(error, PenstockError):
            log.exception("the supervisor failed")
            failed = RunFailed(f"the supervisor failed: {sentence_of(error)}; see {run.log_path('supervisor')}")
            _write_ending(run, "failed", failed.message)
            raise failed from error
        _write_ending(run, "failed", error.message, mistake=isinstance(error, ConfigError))
        raise
    except BaseException as error:
        _write_ending(run, "failed", f"the supervisor was ended by {type(error).__name__}")
        raise
    _keep_best(run, config)
    how = "interrupted" if outcome.interrupted else "complete"
    _write_ending(run, how, status=outcome.status, wall_s=outcome.wall_s)
    return outcome


def _keep_best(run: RunDir, config: Config) -> None:
    """Selects the best checkpoint again: the last one was written before its version was evaluated."""
    for pipeline in config.pipeline:
        if not pipeline.checkpoint.keep_best:
            continue
        try:
            keep_best(run.checkpoints(pipeline.name), run.metrics_path, pipeline.name)
        except OSError as error:
            log.warning("the best checkpoint of %s could not be kept: %s", pipeline.name, error)


def _directory_lost(run: RunDir) -> str:
    lost = f"the run directory {run.root} was deleted or moved during the run"
    return f"{lost}; its contents are lost: start a new run"


def _write_ending(run: RunDir, how: Ending, sentence: str = "", **details: Any) -> None:
    try:
        run.write_ending(how, sentence, **details)
    except OSError as error:  # such as a full disk: the terminal still shows the outcome
        log.warning("the outcome of the run could not be written: %s", error)


@contextlib.contextmanager
def configured(run: RunDir, config_toml: str) -> Iterator[None]:
    """Writes this configuration to the run directory; restores the previous one if the body raises `ConfigError` before
    a step was trained.

    Then a complete run also stays complete: for example when more steps were requested by mistake.
    """
    former, ending = run.config_path.read_text(encoding="utf-8"), run.read_ending()
    since = run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
    run.write_config(config_toml)
    try:
        yield
    except ConfigError:
        if not _has_trained(run, since):
            run.write_config(former)
            if ending is not None and ending["how"] == "complete":
                write_atomically(run.ending_path, json.dumps(ending))
        raise


def _has_trained(run: RunDir, since: int) -> bool:
    """Whether there is a line of a step after that byte of the metrics."""
    metrics = Following(run.metrics_path, since)
    while lines := metrics.read():
        if any(b'"kind":"step"' in line for line in lines):
            return True
    return False


@contextlib.contextmanager
def exclusive(run: RunDir) -> Iterator[None]:
    """Locks the run directory for one supervisor; the kernel releases the lock when this process dies."""
    # Not truncated: a refused supervisor must not erase the pid of the one that runs. No other user may lock it.
    descriptor = os.open(run.lock_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "a", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run.root} is being run by another process; stop that one first") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
