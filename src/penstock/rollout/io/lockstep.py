"""Several ranks, one worker: every rank fetches one batch ahead, together, and prepares it on a thread of its own.

Rank 0 asks the desk; one collective (the fetch) carries the leases to all ranks *and* each rank's news to all others.
There is no other collective in the loop. What keeps ranks from deadlocking each other:

- a rank whose hook fails for good writes its error to the group's store, leaves the group, and only then raises: the
  others' collectives break at once, they read whose error it was, and fail with it;
- a rank that dies without a word breaks the others' collectives too; they say which rank is gone;
- with tensor parallelism a prompt that one rank cannot prepare fails the group, since the others would wait for that
  rank inside the engine; with data parallelism it costs the prompt.

With tensor-parallel engines every rank generates every lease and rank 0 delivers; with data-parallel ones
(`share=True`) each lease belongs to one rank, and the fetch carries the outcomes to rank 0.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import psutil
import torch
import torch.distributed as dist

from penstock.errors import PeerLost, PenstockError, RunFailed
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.rollout.hooks import Failed, Finished, Outcome, Unusable, Workload
from penstock.rollout.io.hook_calls import Store, failed_rollout
from penstock.runtime.offload import Offload
from penstock.runtime.process import start_time
from penstock.wire.messages import Leased

logger = logging.getLogger(__name__)

GroupStore = Any
"""A torch.distributed store; the library exports no name for its type."""

_HEADER = 8
FAILED_KEY = "penstock/failed"
REFUSED_S = 0.05
"""Pause after a refusal, so that a desk that answers at once is not asked without pause."""
LAST_WORD_S = 2.0
"""How long a broken collective waits for the rank that broke it to have said why."""


class BlockingDesk(Protocol):
    """The control plane, called by rank 0 only, on its own thread."""

    def lease(self, samples: int) -> Leased: ...

    def deliver(self, rollouts: Sequence[Rollout], failures: Sequence[FailedRollout]) -> None: ...


class _News(msgspec.Struct, array_like=True):
    """What one rank contributes to a fetch."""

    leases: tuple[PromptLease, ...] = ()
    """From rank 0: the next batch."""
    exhausted: bool = False
    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[FailedRollout, ...] = ()


class Fetch:
    """The one collective: every rank gives its news and gets everybody's. Breaks, never hangs, when a rank is gone."""

    def __init__(self, group: dist.ProcessGroup, store: GroupStore, *, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = group
        self._store = store
        self._frame_bytes = 1 << 16
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_News)
        store.set(f"penstock/pid/{rank}", f"{os.getpid()} {start_time(os.getpid())}")

    def all_news(self, news: _News) -> list[_News]:
        """One collective of equal frames; a second, with larger frames from then on, when somebody's news do not fit.

        Every rank sees every length, so all of them decide alike. Nothing that came over a wire is unpickled.
        """
        body = self._encoder.encode(news)
        while True:
            frames = self._gather(body)
            lengths = [int(frame[:_HEADER].view(torch.int64)) for frame in frames]
            if max(lengths) + _HEADER <= self._frame_bytes:
                break
            self._frame_bytes = 1 << (max(lengths) + _HEADER).bit_length()
        return [
            self._decoder.decode(frame[_HEADER : _HEADER + length].numpy().tobytes())
            for frame, length in zip(frames, lengths, strict=True)
        ]

    def _gather(self, body: bytes) -> list[torch.Tensor]:
        frame = torch.zeros(self._frame_bytes, dtype=torch.uint8)
        frame[:_HEADER].view(torch.int64)[0] = len(body)
        fitting = body[: self._frame_bytes - _HEADER]
        frame[_HEADER : _HEADER + len(fitting)] = torch.frombuffer(bytearray(fitting), dtype=torch.uint8)
        frames = [torch.zeros_like(frame) for _ in range(self.ranks)]
        try:
            dist.all_gather(frames, frame, group=self._group)
        except RuntimeError as error:
            raise self.blame() or PeerLost(f"the fetch broke and no rank said why: {error}") from error
        return frames

    def fail(self, error: PenstockError) -> None:
        """Tells the others why, then leaves the group so that whatever they wait for breaks."""
        text = error.message.removeprefix(f"rank {self.rank}: ")
        text = f"rank {self.rank}: {text}"
        try:
            self._store.compare_set(FAILED_KEY, "", text)  # the first word is the cause, the rest are echoes
        except RuntimeError as lost:  # rank 0 hosts the store; it is gone, and everybody knows by now
            logger.warning("could not tell the other ranks of %s: %s", text, lost)
        self._group = None
        dist.destroy_process_group()

    def blame(self) -> PenstockError | None:
        """Who else broke a collective: the first failing rank's own words, or who is gone. None if nobody did."""
        deadline = time.monotonic() + LAST_WORD_S
        try:
            while time.monotonic() < deadline:
                if self._store.check([FAILED_KEY]):
                    return RunFailed(f"the group failed together: {self._store.get(FAILED_KEY).decode()}")
                dead = self._dead_ranks()
                if dead:
                    return PeerLost(f"rank {', '.join(map(str, dead))} died; the group cannot go on")
                time.sleep(0.02)
        except RuntimeError:
            return PeerLost("rank 0, which hosts the group's store, is gone; the group cannot go on")
        return None

    def _dead_ranks(self) -> list[int]:
        dead: list[int] = []
        for rank in range(self.ranks):
            pid, started = self._store.get(f"penstock/pid/{rank}").decode().split()
            if str(start_time(int(pid))) != started or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE:
                dead.append(rank)
        return dead


def join(store: GroupStore, *, rank: int, ranks: int, timeout_s: float = 1800.0, backend: str = "gloo") -> Fetch:
    """Builds the process group and its fetch; every rank calls it once.

    `timeout_s` must exceed the longest generation: a dead rank is noticed at once, it only bounds a wedged one.
    """
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return Fetch(dist.group.WORLD, store, rank=rank, ranks=ranks, timeout_s=timeout_s)


class Lockstep:
    """One rank's loop. All ranks run it with the same settings; rank 0 also has the desk."""

    def __init__(
        self,
        workload: Workload[Any, Any, Any],
        store: Store,
        fetch: Fetch,
        *,
        desk: BlockingDesk | None = None,
        batch_samples: int = 64,
        share: bool = False,
        progressed: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.workload = workload
        self.fetch = fetch
        self._store = store
        self._desk = desk
        self._batch_samples = batch_samples
        self._share = share
        self._progressed = progressed
        self._news = _News()
        self._reported: tuple[list[Rollout], list[FailedRollout]] = ([], [])
        self._exhausted = False

    def run(self) -> None:
        """Blocks until rank 0's desk is exhausted. If any rank cannot go on, every rank raises with the same cause."""
        preparation = Offload(1, f"prepare-rank-{self.fetch.rank}")
        try:
            self.workload.preflight()
            ahead = self._fetch_and_prepare(preparation)
            while ahead is not None:
                current = ahead
                # One batch ahead: the next is fetched and being prepared while this one is generated.
                ahead = self._fetch_and_prepare(preparation)
                self._generate(current)
            self._flush()
        except BaseException as error:
            cause = self._cause(error)
            self.fetch.fail(cause)
            raise cause from error
        finally:
            preparation.close(timeout_s=1.0)

    def _cause(self, error: BaseException) -> PenstockError:
        if isinstance(error, PeerLost | RunFailed):
            return error
        # The engine's own collectives break with a RuntimeError when another rank is gone: that rank is to blame.
        blamed = self.fetch.blame() if isinstance(error, RuntimeError) else None
        if blamed is not None:
            return blamed
        return RunFailed(f"rank {self.fetch.rank}: {''.join(traceback.format_exception_only(error)).strip()}")

    def _fetch_and_prepare(self, preparation: Offload) -> list[tuple[PromptLease, Future[Any]]] | None:
        """None when there is nothing more. Every rank calls it equally often, in the same order."""
        if self._exhausted:
            return None
        if self._desk is not None:
            answer = self._desk.lease(self._batch_samples)
            self._news.leases = answer.leases
            self._news.exhausted = answer.verdict == "exhausted" or answer.phase in ("complete", "stopped")
            if not answer.leases and not self._news.exhausted:
                time.sleep(REFUSED_S)
        self._progressed("fetch")
        everybody = self._exchange()
        self._exhausted = everybody[0].exhausted
        if not everybody[0].leases and self._exhausted:
            return None
        mine = [
            lease
            for number, lease in enumerate(everybody[0].leases)
            if not self._share or number % self.fetch.ranks == self.fetch.rank
        ]
        return [(lease, preparation.submit(self.workload.prepare, lease)) for lease in mine]

    def _exchange(self) -> list[_News]:
        news, self._news = self._news, _News()
        news.rollouts, news.failures = tuple(self._reported[0]), tuple(self._reported[1])
        self._reported = ([], [])
        everybody = self.fetch.all_news(news)
        if self._desk is not None:
            rollouts = [rollout for one in everybody for rollout in one.rollouts]
            failures = [failure for one in everybody for failure in one.failures]
            if rollouts or failures:
                self._desk.deliver(rollouts, failures)
        return everybody

    def _flush(self) -> None:
        """The outcomes of the last batch: the closing fetch, which carries no leases."""
        self._exchange()
        dist.destroy_process_group()

    def _generate(self, batch: Sequence[tuple[PromptLease, Future[Any]]]) -> None:
        # A prompt that one rank cannot prepare, the others could: with tensor parallelism they must not generate it
        # without that rank. Preparation is deterministic, so a failure that not every rank has is a fault of the rank.
        ready: list[tuple[PromptLease, Any]] = []
        for lease, future in batch:
            try:
                prepared = future.result(self.fetch.timeout_s)
            except (PeerLost, RunFailed):
                raise
            except Exception as error:
                if not self._share and self.fetch.ranks > 1:
                    message = f"prepare of prompt {lease.prompt} raised {type(error).__name__}: {error}"
                    raise RunFailed(message) from error
                self._fail(lease, "prepare", traceback.format_exc())
                continue
            if isinstance(prepared, Unusable):
                self._fail(lease, "prepare", prepared.reason, poison=True)
            else:
                ready.append((lease, prepared))
        if not ready:
            return
        self._progressed(f"generate {len(ready)} prompts")
        generated: Any = self.workload.generate(self.workload.collate([prepared for _, prepared in ready]))
        for (lease, prepared), result in zip(ready, generated, strict=True):
            if self._share or self.fetch.rank == 0:
                self._keep(lease, self.workload.postprocess(prepared, result))

    def _keep(self, lease: PromptLease, outcomes: Sequence[Outcome]) -> None:
        for sample, outcome in zip(lease.samples, outcomes, strict=True):
            if isinstance(outcome, Failed):
                self._reported[1].append(failed_rollout(sample, "postprocess", outcome.error, outcome.poison))
                continue
            assert isinstance(outcome, Finished)
            self._reported[0].append(
                Rollout(
                    sample=sample,
                    version=outcome.version,
                    weights_digest=outcome.weights_digest,
                    reward=outcome.reward,
                    length=outcome.length,
                    payload=self._store.write(outcome.arrays),
                )
            )

    def _fail(self, lease: PromptLease, hook: str, error: str, *, poison: bool = False) -> None:
        if self._share or self.fetch.rank == 0:
            self._reported[1].extend(failed_rollout(sample, hook, error, poison) for sample in lease.samples)
