"""Keeps one engine's weights at the newest published version.

    staged:    poll → fetch → stage → verify → swap → report                generation continues; second buffer
    in place:  poll → fetch → pause → write → verify → resume → report      generation is paused; no second buffer
    relabel:   poll → relabel → report                                      a version whose bytes are already served

A version is verified before it serves, by the digest of the memory that will serve it.

The newest version wins: one update runs at a time, nothing is queued, and versions in between are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
import torch

from penstock.errors import Damaged, PeerLost, PenstockError, RemoteProtocolError, Stale, Transient
from penstock.records.ids import Version
from penstock.records.weights import Held, Manifest
from penstock.runtime.backoff import Backoff
from penstock.runtime.clock import Clock, SystemClock
from penstock.runtime.offload import Offload, background
from penstock.weights.io.digest import digest_of
from penstock.weights.io.fetch import check_fit
from penstock.weights.io.neighbours import Engine, ManifestSource, SelfVerifying, WeightTransport
from penstock.weights.manifest import check_manifest, describe
from penstock.weights.replica import (
    MAX_INTERRUPTIONS,
    AbandonReplica,
    Mismatched,
    Paused,
    Relabelled,
    Replica,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaState,
    ReportReplicaState,
    Resumed,
    ResumeEngine,
    Swapped,
    UpdateFailed,
    Verified,
    WriteBegan,
)
from penstock.weights.settings import WeightsSection

logger = logging.getLogger(__name__)

T = TypeVar("T")
Way = Literal["staged", "in_place"]


class ReplicaReport(msgspec.Struct, frozen=True):
    """The report to the controller after every change."""

    state: ReplicaState
    version: Version
    digest: str
    pause_s: float = 0.0
    skipped_versions: int = 0
    error: str = ""
    damaged: Held | None = None
    """The version whose published bytes differ from its manifest."""


class UpdaterStatistics(msgspec.Struct):
    """Counted since the start. There is no queue: `behind` is the whole backlog."""

    updates: int = 0
    failures: int = 0
    interrupted: int = 0
    """Transfers that were interrupted and retried."""
    overtaken: int = 0
    """Versions that were removed before they could be read, because newer ones exist."""
    skipped_versions: int = 0
    behind: int = 0
    """Versions between the one served and the newest one received."""
    last_pause_s: float = 0.0
    last_fetch_s: float = 0.0
    last_update_s: float = 0.0

    def values(self) -> dict[str, float]:
        """The values of one replica by metric name."""
        return {f"weights_{name}": float(value) for name, value in msgspec.structs.asdict(self).items()}


class ReplicaUpdater:
    """The one task of a worker that changes its engine's weights."""

    def __init__(
        self,
        engine: Engine,
        source: ManifestSource,
        report: Callable[[ReplicaReport], Awaitable[None]],
        transport: WeightTransport,
        *,
        way: Way,
        poll_s: float = 10.0,
        fetch_timeout_s: float = 300.0,
        change_timeout_s: float = WeightsSection().deadline_s,
        report_timeout_s: float = 60.0,
        grace_s: float = 5.0,
        retry_first_s: float = 0.5,
        retry_cap_s: float = 5.0,
        clock: Clock | None = None,
        verify: Callable[[], str] | None = None,
    ) -> None:
        """`verify` returns the digest of the served weights, for engines whose tensors are in another process."""
        self.replica = Replica()
        self.statistics = UpdaterStatistics()
        self._engine = engine
        self._source = source
        self._report = report
        self._transport = transport
        self._verifier = verify
        self._way: Way = way
        self._poll_s = poll_s
        self._fetch_timeout_s = fetch_timeout_s
        self._change_timeout_s = change_timeout_s
        self._report_timeout_s = report_timeout_s
        self._grace_s = grace_s
        self._backoff = Backoff(retry_first_s, retry_cap_s)
        self._poll_backoff = Backoff(retry_first_s, retry_cap_s)
        self._clock = clock or SystemClock()
        self._pause_s = 0.0
        self._skipped = 0
        self._step = "poll"
        self._wedged = False
        self._abandoned = False
        self._unsent: ReplicaReport | None = None
        self._gone: tuple[Manifest | None, int] = (None, 0)
        """The version that was last found removed, and how often in a row."""

    def __repr__(self) -> str:
        return f"ReplicaUpdater({self._way}, at {self._step}, {self.replica}, {self.statistics})"

    @property
    def updating(self) -> bool:
        """Whether an update is under way: only this task may use the engine until it ends."""
        return self._step not in ("poll", "report")

    @property
    def may_serve(self) -> bool:
        """Whether the engine serves one complete, verified version."""
        return self.replica.may_serve

    def figures(self) -> dict[str, float]:
        """The values of one replica by metric name."""
        return self.statistics.values()

    def reset(self) -> None:
        """Resets the state after a restart of the engine, while no update is under way."""
        self.replica = Replica()

    async def run(self) -> None:
        """Updates until cancelled.

        Consumes manifests, produces reports; waits for the next manifest, unblocked by a publication or `poll_s`.
        Raises `PeerLost` if this replica cannot serve: the process must be replaced.
        """
        offload = background(1, "weights")
        try:
            await self._perform(await self._check_initial(offload), offload)
            while True:
                await self._once(offload)
        finally:
            offload.close(0.0)

    async def _check_initial(self, offload: Offload) -> list[ReplicaEffect]:
        """Accepts the initial version of the engine if the digest of its memory matches; else stops generation."""
        claimed = self._engine.digest
        if not claimed or await self._do("initial check", offload, self._served_digest) != claimed:
            await self._do("fence", offload, self._engine.sleep, self._change_timeout_s)
            return [ReportReplicaState(self.replica.state, self.replica.version, "")]
        self.replica.handle(Verified(Version(self._engine.version), claimed), self._clock.now())
        return self.replica.handle(Resumed(), self._clock.now())

    async def _once(self, offload: Offload) -> None:
        """One poll and at most one update."""
        if self._unsent is not None:
            await self._send(self._unsent)
        self._step = "poll"
        try:
            async with asyncio.timeout(self._poll_s + self._report_timeout_s):
                manifest = await self._source.next_manifest(self.replica.held, self._poll_s)
        except (Transient, TimeoutError) as error:
            logger.warning("no answer to the poll for the newest weights (%s); %s continues", error, self.replica)
            await asyncio.sleep(self._poll_backoff.next_s())
            return
        self._poll_backoff.reset()
        if manifest is None or manifest.held == self.replica.held:
            return
        held = self.replica.version
        self.statistics.behind = max(0, manifest.version - held) if held >= 0 else 0
        self._skipped = max(0, self.statistics.behind - 1)
        began = self._clock.now()
        try:
            check_manifest(manifest)
            if self.replica.may_serve and manifest.digest == self.replica.digest:
                update = self._relabel
            else:
                update = self._staged if self._way == "staged" else self._in_place
            await update(manifest, offload)
        except Stale as error:  # raised while fetching, before the served weights were touched: a newer one exists
            if await self._report_missing(manifest, error, offload):
                return
            self.statistics.overtaken += 1
            logger.info("%s", error)
            await asyncio.sleep(self._backoff.next_s())
        except (PenstockError, OSError, RuntimeError, ValueError, KeyError) as error:
            if self._abandoned:
                raise
            await self._failed(error, offload, manifest)
        else:
            self._backoff.reset()
            self.statistics.updates += 1
            self.statistics.skipped_versions += self._skipped
            self.statistics.behind = 0
            self.statistics.last_pause_s = self._pause_s
            self.statistics.last_update_s = self._clock.now() - began
            logger.debug("%s is served after a pause of %.1f ms", describe(manifest), 1e3 * self._pause_s)

    async def _report_missing(self, manifest: Manifest, error: Stale, offload: Offload) -> bool:
        """Reports a version that was removed and is still offered, to be published again; False if it may be old."""
        last, times = self._gone
        self._gone = (manifest, times + 1 if manifest == last else 1)
        if self._gone[1] <= MAX_INTERRUPTIONS:
            return False
        self._gone = (None, 0)
        await self._failed(Damaged(f"{error}; it is still the newest and must be published again"), offload, manifest)
        return True

    async def _staged(self, manifest: Manifest, offload: Offload) -> None:
        # Verified once, in the memory that will serve. If that fails, the fetched bytes are verified to find the cause.
        tensors = await self._fetch(manifest, offload, verify=False)
        await self._do("stage", offload, self._engine.stage, tensors)
        del tensors
        found = await self._do("verify", offload, self._staged_digest, manifest)
        if found != manifest.digest:
            await self._fetch(manifest, offload, verify=True)
            raise RemoteProtocolError(f"the staged version is not {describe(manifest)}: its memory has digest {found}")
        if not self.replica.may_serve:
            await self._do("pause", offload, self._engine.sleep, self._change_timeout_s)
            self._handle(Paused())
        self._pause_s = await self._do(
            "swap", offload, self._engine.swap, manifest.version, manifest.digest, self._change_timeout_s
        )
        if self.replica.may_serve:
            await self._perform(self._handle(Swapped(manifest.version, manifest.digest)), offload)
        else:
            self._handle(Verified(manifest.version, manifest.digest))
            await self._perform([ResumeEngine()], offload)

    async def _in_place(self, manifest: Manifest, offload: Offload) -> None:
        tensors = await self._fetch(manifest, offload, verify=True)
        paused_at = self._clock.now()
        await self._do("pause", offload, self._engine.sleep, self._change_timeout_s)
        self._handle(Paused())
        self._handle(WriteBegan())
        await self._do(
            "write",
            offload,
            self._engine.load_in_place,
            tensors,
            manifest.version,
            manifest.digest,
            self._change_timeout_s,
        )
        del tensors
        await self._verify(manifest, offload)
        self._handle(Verified(manifest.version, manifest.digest))
        self._pause_s = self._clock.now() - paused_at
        await self._perform([ResumeEngine()], offload)

    async def _relabel(self, manifest: Manifest, offload: Offload) -> None:
        """The served bytes are also those of this version: nothing is copied, and generation continues."""
        self._pause_s = 0.0
        await self._do("relabel", offload, self._engine.relabel, manifest.version, self._change_timeout_s)
        await self._perform(self._handle(Relabelled(manifest.version)), offload)

    async def _fetch(self, manifest: Manifest, offload: Offload, *, verify: bool) -> Mapping[str, torch.Tensor]:
        began = self._clock.now()
        fetch = partial(self._transport.fetch, manifest, self._fetch_timeout_s, verify=verify)
        tensors = await self._do("fetch", offload, fetch, timeout_s=self._fetch_timeout_s)
        self.statistics.last_fetch_s = self._clock.now() - began
        if self._verifier is None:
            check_fit(self._engine.served_tensors(), manifest)
        return tensors

    async def _verify(self, manifest: Manifest, offload: Offload) -> None:
        """Compares the digest of the engine's own memory; a mixture is fenced at once."""
        found = await self._do("verify", offload, self._served_digest)
        if found == manifest.digest:
            return
        await self._fence(manifest.digest, found, offload)
        raise RemoteProtocolError(f"the engine does not hold {describe(manifest)}: its memory has digest {found}")

    async def _fence(self, expected: str, found: str, offload: Offload) -> None:
        """Stops an engine that holds a mixture; one that cannot be stopped must be replaced."""
        self._handle(Mismatched(expected, found))
        try:
            await self._do("fence", offload, self._engine.sleep, self._change_timeout_s)
        except PenstockError:
            self._wedged = True
            raise

    async def _recheck(self, offload: Offload) -> None:
        """After a failure while the engine serves: verifies that it still holds its version."""
        found = await self._do("recheck", offload, self._served_digest)
        if found != self.replica.digest:
            await self._fence(self.replica.digest, found, offload)

    def _staged_digest(self, manifest: Manifest) -> str:
        staged = self._engine.staged_tensors()
        if isinstance(self._transport, SelfVerifying):
            return self._transport.delivered(manifest, staged)
        return digest_of(staged)

    def _served_digest(self) -> str:
        return digest_of(self._engine.served_tensors()) if self._verifier is None else self._verifier()

    async def _do(
        self, step: str, offload: Offload, function: Callable[..., T], *arguments: Any, timeout_s: float | None = None
    ) -> T:
        """Runs one step in the background thread; `repr` and the error name the step."""
        self._step = step
        # Engines and transports respect their timeout; one that does not is wedged.
        timeout_s = (self._change_timeout_s if timeout_s is None else timeout_s) + self._grace_s
        allowed = asyncio.timeout(timeout_s)
        try:
            async with allowed:
                return await offload.run(function, *arguments)
        except TimeoutError:
            if not allowed.expired():  # raised by the step itself, for example by a file server
                raise
            self._wedged = True  # its thread is lost and may still change the engine
            raise PeerLost(
                f"step {step!r} of a weight update did not end within {timeout_s:.0f} s; this process must be replaced"
            ) from None

    def _handle(self, event: ReplicaEvent) -> list[ReplicaEffect]:
        return self.replica.handle(event, self._clock.now())

    async def _failed(self, error: Exception, offload: Offload, manifest: Manifest) -> None:
        step, text = self._step, str(error) or type(error).__name__
        logger.warning("update failed at step %r: %s; %r", step, text, self.replica)
        if self.replica.may_serve and step != "fetch" and not self._wedged:
            await self._recheck(offload)
        damaged = manifest.held if isinstance(error, Damaged) else None
        effects = self._handle(UpdateFailed(step, text, isinstance(error, Transient), damaged))
        if effects:
            self.statistics.failures += 1
        else:  # an interrupted transfer, which is retried
            self.statistics.interrupted += 1
        await self._perform(effects, offload)
        if self._wedged:
            raise error
        await asyncio.sleep(self._backoff.next_s())

    async def _perform(self, effects: list[ReplicaEffect], offload: Offload) -> None:
        """Carries out effects in order; resuming may add more."""
        pending = list(effects)
        while pending:
            match pending.pop(0):
                case ResumeEngine():
                    try:
                        await self._do("resume", offload, self._engine.wake, self._change_timeout_s)
                    except (PenstockError, OSError, RuntimeError) as error:
                        pending = [*self._handle(UpdateFailed("resume", str(error))), *pending]
                    else:
                        pending = [*self._handle(Resumed()), *pending]
                case ReportReplicaState(state, version, digest, error, damaged):
                    report = ReplicaReport(state, version, digest, self._pause_s, self._skipped, error, damaged)
                    await self._send(report)
                case AbandonReplica(reason):
                    self._abandoned = True
                    raise PeerLost(f"this replica cannot serve and must be replaced: {reason}")

    async def _send(self, report: ReplicaReport) -> None:
        """A report that does not arrive is sent again before the next poll, unless there is a newer one."""
        self._step = "report"
        self._unsent = report
        try:
            async with asyncio.timeout(self._report_timeout_s):
                await self._report(report)
        except (Transient, TimeoutError) as error:
            logger.warning("the controller did not receive %s: %s", report, error)
        else:
            self._unsent = None
