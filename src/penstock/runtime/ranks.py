"""Processes that work as the ranks of one member of the run.

Rank 0 is the member itself. The other ranks are its child processes: they die with it however it ends, their logs lie
beside its log, and the controller does not see them. They find each other through a private file of the run directory
and talk over loopback. A rank that ends early ends the member, with that rank's failure report.
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
from penstock.runtime.member import RunMember
from penstock.runtime.process import how_ended, is_alive, start_time
from penstock.runtime.progress import ProgressCell

log = logging.getLogger(__name__)

GroupStore = Any
"""A torch.distributed store; the library exports no name for its type."""

FAILED_KEY = "penstock/failed"
REPORT_S = 2.0
"""How long a broken collective waits for the rank that broke it to have said why."""
WATCH_EVERY_S = 0.5


class RankFailure(msgspec.Struct):
    """Why a rank could not go on."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: PenstockError, rank: int) -> RankFailure:
        prefix = f"rank {rank}: "
        return cls(type(error).__name__, prefix + error.message.removeprefix(prefix))

    def error(self) -> PenstockError:
        kind = getattr(errors, self.kind, RunFailed)
        kind = kind if isinstance(kind, type) and issubclass(kind, PenstockError) else RunFailed
        return kind(f"the group failed together: {self.message}")


def file_store(path: Path, ranks: int) -> GroupStore:
    """A store for ranks of one machine: nothing listens, and it outlives any of them."""
    return dist.FileStore(str(path), ranks)  # pyright: ignore[reportPrivateImportUsage]


def join_group(store: GroupStore, *, rank: int, ranks: int, timeout_s: float, backend: str = "gloo") -> None:
    """Builds the process group; every rank calls it once. `timeout_s` bounds a wedged rank, not a dead one."""
    # The library takes this from nowhere else. The ranks of a member share a machine: nothing listens beyond it.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))


class FailureNotes:
    """What the ranks leave in the group's store for each other: who they are, and why one of them failed."""

    def __init__(self, store: GroupStore, *, rank: int, ranks: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self._store = store
        store.set(f"penstock/pid/{rank}", f"{os.getpid()} {start_time(os.getpid())}")

    def tell(self, error: PenstockError) -> None:
        """Leaves the reason for the others to read. The first one is the cause, the rest are echoes."""
        words = RankFailure.of(error, self.rank)
        try:
            self._store.compare_set(FAILED_KEY, "", msgspec.json.encode(words).decode())
        except RuntimeError as lost:  # the store's host is gone, which every rank has noticed by now
            log.warning("could not tell the other ranks of %s: %s", words.message, lost)

    def blame(self) -> PenstockError | None:
        """Which other rank broke a collective: the first failure that was told, or who is dead. None if neither."""
        deadline = time.monotonic() + REPORT_S
        try:
            while time.monotonic() < deadline:
                if self._store.check([FAILED_KEY]):
                    return msgspec.json.decode(self._store.get(FAILED_KEY), type=RankFailure).error()
                dead = self._dead_ranks()
                if dead:
                    return PeerLost(f"rank {', '.join(map(str, dead))} died; the group cannot go on")
                time.sleep(0.02)
        except RuntimeError:
            return PeerLost("the rank that hosts the group's store is gone; the group cannot go on")
        return None

    def _dead_ranks(self) -> list[int]:
        dead: list[int] = []
        for rank in range(self._ranks):
            pid, started = self._store.get(f"penstock/pid/{rank}").decode().split()
            if not is_alive(int(pid), float(started)):
                dead.append(rank)
        return dead


class RankChildren:
    """The other ranks of this process. Start them from the main thread: children die with the thread that made them."""

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
        """Starts ranks 1 and above. `seat(rank, progress cell)` is what a rank reads on its standard input first."""
        os.close(os.open(self.store, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for rank in range(1, self.ranks):
            self._cells[rank] = ProgressCell()
            cell = self._cells[rank].fileno()
            passed = (cell, *(descriptors or {}).get(rank, ()))
            self._children[rank] = await self._start(rank, seat(rank, cell), passed)

    async def _start(self, rank: int, seat: msgspec.Struct, passed: tuple[int, ...]) -> asyncio.subprocess.Process:
        process, name = self._process, self.name(rank)
        process.run.failure_path(name).unlink(missing_ok=True)
        with process.run.log_path(name).open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "penstock.roles", self._role, str(process.run.root)),
                *("--name", name, "--member", f"{process.member}.rank{rank}", "--session", process.session),
                *("--parent", str(os.getpid()), "--pipeline", process.pipeline_name, "--index", str(process.index)),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=passed,
            )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(seat) + b"\n")
        log.info("started %s as process %d", name, child.pid)
        return child

    def name(self, rank: int) -> str:
        return f"{self._process.name}.rank{rank}"

    def signal(self, number: int) -> None:
        """Sends it to every rank that is still there."""
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.send_signal(number)

    async def first_of(self, expected: asyncio.Future[Any]) -> None:
        """Waits for it, and raises instead when a rank ends before. The ranks' progress counts as this process's."""
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
        """Waits until all have ended."""
        for child in self._children.values():
            await child.wait()

    async def close(self) -> None:
        """Kills those that have not ended, and removes the store."""
        for rank, child in self._children.items():
            if child.returncode is None:
                log.info("killing %s", self.name(rank))
                child.kill()
                await child.wait()
        self.store.unlink(missing_ok=True)

    def _pass_on_progress(self) -> None:
        """A rank that hangs holds up the others at the next collective, so the group moves if any of its ranks does."""
        for rank, cell in self._cells.items():
            progress = cell.read()
            if progress is not None and progress.ago_s < WATCH_EVERY_S:
                self._process.progress.moved(f"rank {rank}: {progress.doing}")

    def failure_of(self, rank: int) -> PenstockError:
        """Why a rank has ended: its failure report, or its exit code."""
        code = self._children[rank].returncode
        said = self._process.run.read_failure(self.name(rank))
        if said is not None:
            return RankFailure(said["kind"], f"rank {rank}: {said['message'].removeprefix(f'rank {rank}: ')}").error()
        assert code is not None
        return PeerLost(f"rank {rank} {how_ended(code)}; the group cannot go on")
