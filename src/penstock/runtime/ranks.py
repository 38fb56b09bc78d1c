"""The processes that are the ranks of one member of the run.

Rank 0 is the member itself. The other ranks are its child processes: they die with it for any reason, their logs are
beside its log, and the controller does not see them. They find each other through a private file of the run directory
and communicate over loopback. A rank that ends early ends the member, with that rank's failure report.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from penstock import errors
from penstock.errors import PeerLost, PenstockError, RunFailed
from penstock.runtime.interpreter import python_command
from penstock.runtime.member import RunMember
from penstock.runtime.process import how_ended, is_alive, start_time
from penstock.runtime.progress import ProgressCell
from penstock.runtime.run_token import handed_over

log = logging.getLogger(__name__)

GroupStore = Any
"""A torch.distributed store; the library exports no name for its type."""

FAILED_KEY = "penstock/failed"
REPORT_S = 2.0
"""How long a rank waits, after a broken collective, for the failure report of the rank that broke it."""
WATCH_EVERY_S = 0.5


class RankFailure(msgspec.Struct):
    """Why a rank failed."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: PenstockError, rank: int) -> RankFailure:
        prefix = f"rank {rank}: "
        return cls(type(error).__name__, prefix + error.message.removeprefix(prefix))

    def error(self) -> PenstockError:
        kind = getattr(errors, self.kind, RunFailed)
        kind = kind if isinstance(kind, type) and issubclass(kind, PenstockError) else RunFailed
        return kind(f"the group of ranks failed: {self.message}")


def file_store(path: Path, ranks: int) -> GroupStore:
    """A store for ranks of one machine: it needs no port, and outlives every rank."""
    return dist.FileStore(str(path), ranks)  # pyright: ignore[reportPrivateImportUsage]


def join_group(store: GroupStore, *, rank: int, ranks: int, timeout_s: float, backend: str = "gloo") -> None:
    """Creates the process group; every rank calls it once. `timeout_s` detects a hanging rank, not a dead one."""
    # Gloo reads the interface only from the environment. The ranks share a machine, so loopback is enough.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))


class FailureNotes:
    """Records of the ranks in the group's store: their pids, and the first failure."""

    def __init__(self, store: GroupStore, *, rank: int, ranks: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self._store = store
        store.set(f"penstock/pid/{rank}", f"{os.getpid()} {start_time(os.getpid())}")

    def report(self, error: PenstockError) -> None:
        """Stores the reason for the other ranks. Only the first is kept: later failures are its consequences."""
        failure = RankFailure.of(error, self.rank)
        try:
            self._store.compare_set(FAILED_KEY, "", msgspec.json.encode(failure).decode())
        except RuntimeError as lost:  # the host of the store is lost, which every rank detects itself
            log.warning("could not report to the other ranks: %s (%s)", failure.message, lost)

    def find_cause(self) -> PenstockError | None:
        """Which rank broke a collective: the first failure in the store, or the dead ranks. None if neither."""
        deadline = time.monotonic() + REPORT_S
        try:
            while time.monotonic() < deadline:
                if self._store.check([FAILED_KEY]):
                    return msgspec.json.decode(self._store.get(FAILED_KEY), type=RankFailure).error()
                dead = self._dead_ranks()
                if dead:
                    return PeerLost(f"rank {', '.join(map(str, dead))} died; the group cannot continue")
                time.sleep(0.02)
        except RuntimeError:
            return PeerLost("the rank that hosts the group's store is lost; the group cannot continue")
        return None

    def _dead_ranks(self) -> list[int]:
        dead: list[int] = []
        for rank in range(self._ranks):
            pid, started = self._store.get(f"penstock/pid/{rank}").decode().split()
            if not is_alive(int(pid), float(started)):
                dead.append(rank)
        return dead


class RankChildren:
    """The other ranks of this process. Start them in the main thread: children die with the thread that starts them."""

    def __init__(self, process: RunMember, role: str, ranks: int) -> None:
        self.ranks = ranks
        self.store = process.run.root / f".ranks-{process.member}"
        self._process = process
        self._role = role
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._cells: dict[int, ProgressCell] = {}

    async def start(
        self, seat: Callable[[int, int], msgspec.Struct], descriptors: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        """Starts ranks 1 and above. Each reads `seat(rank, progress cell)` as the first line of standard input."""
        os.close(os.open(self.store, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for rank in range(1, self.ranks):
            self._cells[rank] = ProgressCell()
            cell = self._cells[rank].fileno()
            passed = (cell, *(descriptors or {}).get(rank, ()))
            self._children[rank] = await self._start(rank, seat(rank, cell), passed)

    async def _start(self, rank: int, seat: msgspec.Struct, passed: tuple[int, ...]) -> asyncio.subprocess.Process:
        process, name = self._process, self.name(rank)
        process.run.failure_path(name).unlink(missing_ok=True)
        with process.run.log_path(name).open("ab") as output, handed_over(process.run.token()) as token:
            child = await asyncio.create_subprocess_exec(
                *python_command("-m", "penstock.roles", self._role, str(process.run.root)),
                *("--name", name, "--member", f"{process.member}.rank{rank}", "--session", process.session),
                *("--parent", str(os.getpid()), "--pipeline", process.pipeline_name, "--index", str(process.index)),
                *("--token-fd", str(token)),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(*passed, token),
            )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(seat) + b"\n")
        log.info("started %s as process %d", name, child.pid)
        return child

    def name(self, rank: int) -> str:
        return f"{self._process.name}.rank{rank}"

    def signal(self, number: int) -> None:
        """Sends the signal to every rank that is alive."""
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.send_signal(number)

    async def first_of(self, expected: asyncio.Future[Any]) -> None:
        """Waits for `expected`; raises if a rank ends first. Progress of a rank counts as progress of this process."""
        while True:
            done, _ = await asyncio.wait([expected], timeout=WATCH_EVERY_S)
            if done:
                expected.result()
                return
            for rank, child in self._children.items():
                if child.returncode is not None:
                    raise self.failure_of(rank)
            self._pass_on_progress()

    async def wait(self) -> None:
        """Waits until all ranks have ended."""
        for child in self._children.values():
            await child.wait()

    async def close(self) -> None:
        """Kills the ranks that have not ended, and removes the store."""
        for rank, child in self._children.items():
            if child.returncode is None:
                log.info("killing %s", self.name(rank))
                child.kill()
                await child.wait()
        self.store.unlink(missing_ok=True)

    def _pass_on_progress(self) -> None:
        """Reports progress if any rank makes progress: a rank that hangs blocks the others at the next collective."""
        for rank, cell in self._cells.items():
            progress = cell.read()
            if progress is not None and progress.ago_s < WATCH_EVERY_S:
                self._process.progress.moved(f"rank {rank}: {progress.doing}")

    def failure_of(self, rank: int) -> PenstockError:
        """Why a rank has ended: its failure report, or its exit code."""
        code = self._children[rank].returncode
        found = self._process.run.read_failure(self.name(rank))
        if found is not None:
            return RankFailure(found["kind"], f"rank {rank}: {found['message'].removeprefix(f'rank {rank}: ')}").error()
        assert code is not None
        return PeerLost(f"rank {rank} {how_ended(code)}; the group cannot continue")
