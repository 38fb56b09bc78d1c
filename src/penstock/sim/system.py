"""The whole system in one process, on virtual time: the actual controller, workers and trainers of a run.

Their own `main` functions run, over real rings, real weight files, real checkpoints and a real journal, in a directory
of the memory file system. Simulated are time, threads, the network, processes and a model's computation. The caller
starts and restarts the processes: this package does not import the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from penstock.config.devices import devices_of
from penstock.config.run import Config
from penstock.control.io.memory import MemoryClient
from penstock.control.io.service import ControlService
from penstock.errors import InvalidTransition, PenstockError, RunFailed
from penstock.journal.virtual import VirtualJournal
from penstock.payload.io import mapping as mappings
from penstock.payload.io.fetch import Transport
from penstock.payload.io.memory import MemoryExchange, MemoryWire
from penstock.payload.io.shm import Ring
from penstock.payload.io.wire_client import Wire
from penstock.records.ids import MemberId, PipelineName
from penstock.records.payload import RingAddress
from penstock.roles import rollout_worker, trainer
from penstock.roles.controller import service_of, until_stopped
from penstock.roles.process import UNEXPECTED, RoleProcess
from penstock.rollout.io.hook_calls import Evaluating
from penstock.runtime.clock import SystemClock
from penstock.runtime.disk import replace_flush
from penstock.runtime.lag import LagMonitor
from penstock.runtime.member import StoppedAtStart
from penstock.runtime.process import host_id
from penstock.runtime.rundir import RunDir
from penstock.runtime.tasks import Tasks
from penstock.sim.disk import Disk
from penstock.sim.loop import CURRENT, Process, VirtualLoop, virtual_loop
from penstock.sim.network import Network, PayloadNet
from penstock.sim.parts import EngineFaults, SimEngine, SimEnvironment, SimLearner, SimWorkload, Work, small_policy
from penstock.sim.truth import Truth
from penstock.train import checkpoint
from penstock.wire import messages
from penstock.wire.messages import Heartbeat, Reply, Request

MEMORY = "/dev/shm"
TICK_S = 0.25
PROMISING = (
    messages.Register,
    messages.AskLease,
    messages.Deliver,
    messages.AskBatch,
    messages.AckStep,
    messages.AckCheckpoint,
    messages.PublishWeights,
)
"""Calls whose answers a peer relies on: the event must be committed first."""
KILLED = -9
NEVER_S = 1e7
TIMED = {
    "step": "step_s",
    "fetch": "fetch_weights_s",
    "publish": "publish_s",
    "fetch_share": "fetch_s",
    "postprocess": "postprocess_s",
    "_write_checkpoint": "save_s",
    "_learner": "build_s",
    "_parts": "build_s",
}
"""The duration in `Work` by name of the offloaded function."""
KEPT_LINES = 400


class Conditions(msgspec.Struct):
    """Present conditions of the network and the disk."""

    latency_s: float = 0.002
    lose: float = 0.0
    reset: float = 0.0
    repeat: float = 0.0
    corrupt: float = 0.0
    """Probability for payloads over the network."""
    commit_s: float = 0.002
    disk_full: bool = False
    flush_lies: bool = False


class History:
    """All observable events in order: equal seeds give equal digests."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.count = 0

    def add(self, line: str) -> None:
        line = f"{self._now():10.4f} {line}"
        self._digest.update(line.encode() + b"\n")
        self.lines.append(line)
        self.count += 1

    def digest(self) -> str:
        return self._digest.hexdigest()


class LogLine(msgspec.Struct, frozen=True):
    """A log line of a process."""

    at: float
    process: str
    level: int
    line: str


class SimMember(RoleProcess):
    """A process of the run with the simulation's client, heartbeat and lag monitor."""

    __slots__ = ("process", "system")
    system: System
    process: Process

    def client(self) -> Any:
        return MemoryClient(
            self.system.network.link(self.process),
            PipelineName(self.pipeline.name),
            self.member,
            unreachable_timeout_s=self.config.control.reconnect_s,
        )

    def heartbeat(self) -> Any:
        return SimSidecar(self)

    def lag_monitor(self) -> LagMonitor:
        return NoLag(self.name)

    @contextmanager
    def served(self, ring: Ring) -> Iterator[RingAddress]:
        section, ports = self.config.payload, ()
        if section.transport == "tcp":
            exchange, directory = self.system.exchange, self.ring_directory
            server = exchange.serve(ring.name, self.run.token(), ports=section.ports, directory=directory)
            self.system.payload_net.owners |= dict.fromkeys(server.ports, self.process)
            self.process.at_death.append(server.close)
            ports = server.ports
        yield ring.address(host_id=host_id(), host=section.host, tcp_ports=ports)

    def wires(self) -> Mapping[Transport, Callable[[], Wire]]:
        return {"tcp": lambda: MemoryWire(self.system.exchange)}


class NoLag(LagMonitor):
    """A loop with virtual time is never late."""

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()


class SimSidecar:
    """The heartbeat of a member, in a separate process that dies with it."""

    def __init__(self, member: SimMember) -> None:
        system = member.system
        self._member = member
        self._process = Process(system.loop, f"{member.process.name}.heart")
        self._client = MemoryClient(
            system.network.link(self._process),
            PipelineName(member.pipeline.name),
            member.member,
            unreachable_timeout_s=5.0,
        )
        member.process.at_death.append(self._process.kill)
        self._process.run(self._beat())

    async def _beat(self) -> None:
        member, every_s = self._member, self._member.config.control.heartbeat_every_s
        while True:
            progress = member.progress.read()
            beat = Heartbeat(
                PipelineName(member.pipeline.name),
                member.member,
                progressed_ago_s=progress.ago_s if progress is not None else 0.0,
                doing=progress.doing if progress is not None else "starting",
            )
            with contextlib.suppress(PenstockError):  # the next beat tries again
                await self._client.call(beat, timeout_s=5.0)
            await asyncio.sleep(every_s)

    def stop(self, timeout_s: float) -> None:
        self._process.kill()


class Placed(msgspec.Struct):
    """A started process and its exit code."""

    process: Process
    member: SimMember
    ended: asyncio.Future[int]
    role: str = ""
    rings: list[Path] = []
    """Files it mapped."""


class System:
    """Processes, network, disk and invariants of one simulated run."""

    def __init__(self, loop: VirtualLoop, config: Config, work: Work, seed: int, root: Path) -> None:
        self.loop = loop
        self.config = config
        self.work = work
        self.seed = seed
        self.root = root
        self.run = RunDir.create(root, "run", "", "simulated")
        self.random = Random(f"{seed} system")
        self.conditions = Conditions(latency_s=work.latency_s, commit_s=work.commit_s)
        self.disk = Disk(
            self.run.root, self.run.journal_path, self.conditions, work.commit_s, lambda: loop.threads.in_one
        )
        self.active: defaultdict[str, list[float]] = defaultdict(list)
        """Amounts of the active faults by field of `Conditions`."""
        self.history = History(loop.time)
        self.log_lines: list[LogLine] = []
        self.truth = Truth(config.pipeline, loop.time)
        self.truth.may_miss = config.payload.transport != "shm"  # payloads of another machine can be unreachable
        self.network = Network(loop, Random(f"{seed} network"), self.conditions, self._served)
        self.payload_net = PayloadNet(self.network, Random(f"{seed} payloads"))
        self.exchange = MemoryExchange(self.payload_net)
        self.placed: dict[str, Placed] = {}
        self.engine_faults: dict[str, EngineFaults] = {}
        self.service: ControlService | None = None
        self.broken: asyncio.Future[None] = loop.create_future()
        self.outage: asyncio.Future[float] = loop.create_future()
        """Set when the power fails, to the seconds without power."""
        self.stuck_until = 0.0
        """Optimiser steps that begin before this never end."""
        self.starts = 0
        self.learners: dict[str, SimLearner] = {}
        self._confirmed: set[tuple[MemberId, int]] = set()
        """Checkpoints that a trainer reported as written, by step."""
        self._cells: list[Any] = []
        self._durations = Random(f"{seed} durations")

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self, role: str, name: str, member: str, session: str, pipeline: str = "", index: int = 0) -> Placed:
        """Starts a process as the operating system would; `name` is its name in the run."""
        self.starts += 1
        process = Process(self.loop, name)
        number = self.starts
        made = SimMember(
            run=self.run,
            name=name,
            member=MemberId(member),
            session=session,
            pipeline_name=PipelineName(pipeline),
            index=index,
            config=self.config,
            random=Random(f"{self.seed} {name} {number}"),
            ring_directory=str(self.root),
            pid=1000 + number,
        )
        made.system, made.process = self, process
        self._cells.append(made.progress)
        ended: asyncio.Future[int] = self.loop.create_future()
        placed = Placed(process, made, ended, role)
        self.placed[name] = placed
        process.at_death += [lambda: _settle(ended, KILLED), lambda: self.truth.vacates(name)]
        mains: dict[str, Callable[[SimMember], Coroutine[Any, Any, None]]] = {
            "controller": self._controller,
            "trainer": lambda one: trainer.main(one, self._learner),  # type: ignore[arg-type]
            "rollout_worker": lambda one: rollout_worker.main(one, self._parts, self._evaluating),
        }
        self.history.add(f"start {name}")
        process.run(self._live(placed, mains[role]))
        return placed

    async def _live(self, placed: Placed, main: Callable[[SimMember], Coroutine[Any, Any, None]]) -> None:
        """As `run_role` does: an error becomes the process's failure report and its exit code."""
        member = placed.member
        try:
            await main(member)
            code = 0
        except StoppedAtStart:
            code = 0
        except PenstockError as error:
            if placed.process.state == "unwinding":
                return
            code = error.exit_code
            self.run.write_failure(member.name, type(error).__name__, str(error), code)
        except Exception as error:
            if placed.process.state == "unwinding":
                return
            logging.getLogger(__name__).exception("unexpected %s", type(error).__name__)
            code = UNEXPECTED
            self.run.write_failure(member.name, type(error).__name__, str(error), code)
        self.history.add(f"exit {member.name} {code}")
        _settle(placed.ended, code)
        placed.process.ended()

    def kill(self, name: str) -> bool:
        placed = self.placed.get(name)
        if placed is None or not placed.process.alive:
            return False
        self.history.add(f"kill {name}")
        placed.process.kill()
        return True

    # -- roles ------------------------------------------------------------------------------------------------------

    async def _controller(self, member: SimMember) -> None:
        """The wiring of `roles.controller`, with a journal and a port in memory."""
        journal = VirtualJournal(self.run.journal_path, self.run.run_id, self.disk)
        member.process.at_death.append(journal.kill)
        lines: Any = Lines(self.truth)
        service = service_of(self.config, journal, SystemClock(), lines, NoLag("controller"))
        session = self.run.root / "session"
        new_session = not session.exists() or session.read_text() != member.session
        try:
            service.start(new_session=new_session)
            await service.settle()
            session.write_text(member.session)
            async with Tasks() as tasks:
                tasks.spawn("service", service.run())
                self.service = service
                self.network.serve(partial(self._answered, service, journal))
                await until_stopped(member, service)
                service.close()
                self.network.close()
                tasks.cancel()
            service.check()
        finally:
            if member.process.state == "running":
                journal.close(1.0)
        if service.failure:
            raise RunFailed(service.failure)

    async def _answered(self, service: ControlService, journal: VirtualJournal, request: Request) -> Reply:
        """A commit takes time: an answer in the same loop iteration as its event was sent before the commit."""
        began, seq = self.loop.iterations, journal.last_seq
        reply = await service.call(request)
        if isinstance(request, PROMISING) and self.loop.iterations == began and journal.last_seq != seq:
            self.breaks()
            self.truth.violated(f"{type(request).__name__} was answered before its event was committed")
        return reply

    def _learner(self, member: RoleProcess) -> SimLearner:
        pipeline = member.pipeline
        devices = devices_of(self.config).placements[pipeline.name].train if self.config.pool.devices else ()
        progressed = member.progress.moved
        learner = SimLearner(self.work, self.truth, pipeline.name, self.seed, progressed, member.name, devices)
        found = checkpoint.latest(self.run.checkpoints(pipeline.name))
        if found is not None:
            checkpoint.load(found, learner)  # type: ignore[arg-type]
        self.learners[pipeline.name] = learner
        return learner

    def _parts(self, member: RoleProcess) -> Any:
        policy = small_policy()
        engine_faults = self.engine_faults.setdefault(member.name, EngineFaults())
        if not engine_faults.builds:
            raise ValueError("the engine cannot be built, in simulation")
        if not engine_faults.lasting:
            engine_faults = self.engine_faults[member.name] = EngineFaults()
        engine = SimEngine(policy, engine_faults, self.truth, member.name, shared=bool(self.config.pool.devices))
        workload = SimWorkload(engine, self.work, engine_faults, self.truth, member.random, self.seed)
        return SimEnvironment(self.work.prompts), engine, workload, policy

    @contextmanager
    def _evaluating(self, member: RoleProcess, engine: SimEngine, policy: Any) -> Iterator[Evaluating | None]:
        """Separate hooks for evaluations, as in a real worker."""
        if not member.pipeline.evaluation.every_steps:
            yield None
            return
        engine_faults = self.engine_faults[member.name]
        workload = SimWorkload(engine, self.work, engine_faults, self.truth, member.random, self.seed)
        yield Evaluating(workload, engine, lambda lease, number, made: None)

    # -- durations -------------------------------------------------------------------------------------------------

    def duration(self, offload: str, function: str) -> float:
        """Duration of an offloaded call in seconds."""
        work = self.work
        name = function.rpartition(".")[2]
        if name == "step" and self.loop.time() < self.stuck_until:
            return NEVER_S
        base_s = getattr(work, TIMED.get(name, "other_s"))
        took_s = base_s * (1 + work.spread * (2 * self._durations.random() - 1))
        self.truth.trained_s += took_s if name == "step" else 0.0
        return took_s

    # -- observations ----------------------------------------------------------------------------------------------

    def _served(self, client: str, request: Request, reply: Reply) -> None:
        if not isinstance(request, Heartbeat):
            body = hashlib.blake2b(msgspec.msgpack.encode((request, reply)), digest_size=6).hexdigest()
            self.history.add(f"{client} {type(request).__name__} -> {type(reply).__name__} {body}")
        try:
            self.truth.served(request, reply)
            if isinstance(request, messages.AckCheckpoint) and isinstance(reply, messages.Ok):
                self._check_confirmed(request)
        except InvalidTransition:
            self.breaks()
            raise

    def _check_confirmed(self, request: messages.AckCheckpoint) -> None:
        """Only a checkpoint that is on the disk may be confirmed. A repeated call may come after it was removed."""
        directory = self.run.checkpoints(request.pipeline) / f"step-{request.step:08d}"
        if (request.member, request.step) not in self._confirmed and not self.disk.holds(directory):
            self.truth.violated(
                f"{request.pipeline}: the checkpoint of step {request.step} is confirmed and not written"
            )
        self._confirmed.add((request.member, request.step))

    def kept_checkpoints(self, pipeline: str) -> tuple[list[str], list[str]]:
        """The checkpoints of a pipeline, and those of them that a lying disk has lost."""
        names = [path.name for path in sorted(self.run.checkpoints(pipeline).glob("step-*"))]
        lost = [one for one in names if any(f"/{pipeline}/{one}/" in line for line in self.disk.lost)]
        return names, lost

    def breaks(self) -> None:
        if not self.broken.done():
            self.broken.set_result(None)

    def close(self) -> None:
        for cell in self._cells:
            cell.close()


class Lines:
    """Receives the controller's metric lines and checks those of evaluations."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    def write(self, line: dict[str, Any]) -> None:
        if line["kind"] == "evaluation":
            self._truth.evaluated(line)


def _settle(future: asyncio.Future[int], code: int) -> None:
    if not future.done():
        future.set_result(code)


class _LogCapture(logging.Handler):
    def __init__(self, system: System) -> None:
        super().__init__(logging.INFO)
        self._system = system

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        if process is None or process.state == "unwinding":
            return
        line = LogLine(self._system.loop.time(), process.name, record.levelno, record.getMessage())
        self._system.log_lines.append(line)


@contextmanager
def simulated_system(config: Config, work: Work, seed: int, *, real_limit_s: float = 600.0) -> Iterator[System]:
    """A system on a new loop and in a new directory; both are removed afterwards."""
    root = Path(tempfile.mkdtemp(prefix="penstock-sim-", dir=MEMORY if Path(MEMORY).is_dir() else None))
    made: list[System] = []

    def duration(offload: str, function: str) -> float:
        return made[0].duration(offload, function)

    def opened(mapping: mappings.Mapping) -> None:
        process = CURRENT.get()
        if process is not None:
            process.at_death.append(mapping.close)
            placed = made[0].placed.get(process.name)
            if placed is not None and placed.process is process and placed.role == "rollout_worker":
                placed.rings.append(mapping.path)

    package, before, opening = logging.getLogger("penstock"), logging.getLogger("penstock").level, mappings.opened
    try:
        with (
            virtual_loop(duration, real_limit_s=real_limit_s) as loop,
            replace_flush(lambda path: made[0].disk.flush(path)),
        ):
            system = System(loop, config, work, seed, root)
            made.append(system)
            listener = _LogCapture(system)
            package.addHandler(listener)
            package.setLevel(logging.INFO)
            propagates, package.propagate = package.propagate, False
            mappings.opened = opened  # type: ignore[assignment]
            try:
                yield system
            finally:
                package.removeHandler(listener)
                package.setLevel(logging.CRITICAL)  # no log lines from unwinding
        made[0].close()
        package.propagate = propagates
    finally:
        package.setLevel(before)
        mappings.opened = opening
        shutil.rmtree(root, ignore_errors=True)
