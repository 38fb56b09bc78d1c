"""Fetching a batch: every payload by the nearest way, and an exact reason for each one that could not be had."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

from penstock.errors import Aborted, ConfigError, LocalProtocolError, PeerLost, RemoteProtocolError, Stale, Transient
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.reader import RingReader
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.tcp_client import TcpClient
from penstock.payload.retry import (
    BatchCancelled,
    BatchRetry,
    BeginCall,
    CallFailed,
    CallSucceeded,
    Failure,
    RetryPolicy,
    TimePassed,
)
from penstock.records.payload import PayloadRef, RingAddress

log = logging.getLogger(__name__)

Carrier = Literal["shm", "tcp", "ucxx"]
NEAREST_FIRST: tuple[Carrier, ...] = ("shm", "ucxx", "tcp")

CLOSE_S = 10.0
KEEP_UNUSED_FETCHES = 16
"""A ring that this many fetches did not mention is detached."""


class WireClient(Protocol):
    """What the fetcher asks of a carrier that is not shared memory."""

    def read(
        self, address: RingAddress, ref: PayloadRef, deadline: float, tried: set[int], cancellation: Cancellation
    ) -> Received | Failure: ...

    def close(self) -> None: ...


class Held(Protocol):
    """Something to be ended exactly once; true when it was still ours."""

    def consumed(self) -> bool: ...

    def released(self) -> bool: ...


class _OwnMemory(NamedTuple):
    """A body that came over a wire: acknowledged on receipt, so both endings only give the memory back."""

    buffers: Buffers
    received: Received

    def consumed(self) -> bool:
        self.buffers.give_back(self.received.memory)
        return True

    released = consumed


class FetchReport:
    """The payloads of one batch, and what is missing and why.

    The views stay good until `consumed` (the batch was trained: the memory may be reused) or `released` (it was not:
    what came through shared memory can be fetched again). Exactly one of the two must be called.
    """

    def __init__(
        self, views: dict[PayloadRef, memoryview], missing: dict[PayloadRef, Failure], held: list[Held]
    ) -> None:
        self.views = views
        self.missing = missing
        self._held = held

    def __repr__(self) -> str:
        return f"<FetchReport {len(self.views)} payloads, {len(self.missing)} missing, {len(self._held)} held>"

    def consumed(self) -> int:
        """Give the memory back; how many payloads had been taken over by another reader in the meantime."""
        held, self._held = self._held, []
        return sum(not one.consumed() for one in held)

    def released(self) -> None:
        """Give the memory back without having used the payloads."""
        held, self._held = self._held, []
        for one in held:
            one.released()


class BatchFetcher:
    """Fetches batches for one trainer process. Blocking and thread-safe; call it from a worker thread.

    Payloads on the same host are read in place; others come by UCXX where the producer offers it and it is installed
    here, or else by TCP. `carrier` overrides the choice for all rings.
    """

    def __init__(
        self,
        *,
        host_id: str,
        token: str = "",
        label: str = "trainer",
        directory: str = DIRECTORY,
        verify: bool = True,
        carrier: Carrier | Literal["auto"] = "auto",
        policy: RetryPolicy | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self._host_id = host_id
        self._token = token
        self._label = label
        self._directory = directory
        self._verify = verify
        self._forced = carrier
        self._policy = policy or RetryPolicy()
        self._buffers = buffers or Buffers()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._readers: dict[str, RingReader] = {}
        self._unused: dict[str, int] = {}
        self._carriers: dict[str, Carrier] = {}
        self._clients: dict[Carrier, WireClient] = {}
        self._going_on: set[Cancellation] = set()
        self._closed = False
        self._calls = ThreadPoolExecutor(self._policy.concurrency, thread_name_prefix="payload-call")

    def __repr__(self) -> str:
        return f"<BatchFetcher {self._label}, carriers {self._carriers}>"

    def fetch(
        self, refs: Iterable[PayloadRef], rings: Sequence[RingAddress], cancellation: Cancellation | None = None
    ) -> FetchReport:
        """Get every payload named in `refs` from the rings that `rings` says how to reach, within the policy's time."""
        addresses = {address.ring: address for address in rings}
        report = FetchReport({}, {}, [])
        remote: dict[PayloadRef, tuple[WireClient, RingAddress]] = {}
        ways: dict[str, Carrier | Failure] = {}
        try:
            with self._lock:
                if self._closed:
                    raise LocalProtocolError("this fetcher is closed")
                self._detach_unused(addresses)
                for ref in dict.fromkeys(refs):
                    if ref.ring not in ways:
                        ways[ref.ring] = self._way(ref.ring, addresses.get(ref.ring))
                    way = ways[ref.ring]
                    if isinstance(way, Failure):
                        report.missing[ref] = way
                    elif way == "shm":
                        self._take(ref, report)
                    else:
                        remote[ref] = (self._clients[way], addresses[ref.ring])
            if remote:
                self._fetch_remote(remote, report, cancellation or Cancellation())
        except BaseException:
            report.released()
            raise
        return report

    def close(self) -> None:
        """Break off what is going on, detach from all rings and close all connections.

        Payloads not consumed stay readable by others.
        """
        with self._lock:
            self._closed = True
            going_on = list(self._going_on)
        for cancellation in going_on:
            cancellation.cancel("the fetcher is closing")
        with self._lock:
            self._ended.wait_for(lambda: not self._going_on, CLOSE_S)
        self._calls.shutdown()
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            for client in self._clients.values():
                client.close()
            self._readers.clear()
            self._clients.clear()

    def _take(self, ref: PayloadRef, report: FetchReport) -> None:
        try:
            lease = self._readers[ref.ring].take(ref)
        except Stale as error:
            report.missing[ref] = Failure("stale", str(error))
        except Transient as error:
            report.missing[ref] = Failure("busy", str(error))
        else:
            report._held.append(lease)
            report.views[ref] = lease.view

    def _fetch_remote(
        self,
        wanted: dict[PayloadRef, tuple[WireClient, RingAddress]],
        report: FetchReport,
        cancellation: Cancellation,
    ) -> None:
        if cancellation.reason is not None:
            raise Aborted(cancellation.reason)
        with self._lock:
            self._going_on.add(cancellation)
        try:
            self._call_all(wanted, report, cancellation)
        finally:
            with self._lock:
                self._going_on.discard(cancellation)
                self._ended.notify_all()

    def _call_all(
        self,
        wanted: dict[PayloadRef, tuple[WireClient, RingAddress]],
        report: FetchReport,
        cancellation: Cancellation,
    ) -> None:
        retry = BatchRetry(wanted, self._policy, time.monotonic())
        landed: queue.SimpleQueue[tuple[PayloadRef, Received | Failure | BaseException]] = queue.SimpleQueue()
        tried: dict[PayloadRef, set[int]] = {}

        def call(ref: PayloadRef, deadline: float) -> None:
            client, address = wanted[ref]
            try:
                landed.put((ref, client.read(address, ref, deadline, tried.setdefault(ref, set()), cancellation)))
            except BaseException as error:  # noqa: BLE001  raised again by the thread that waits for it
                landed.put((ref, error))

        broken: BaseException | None = None
        effects = retry.handle(TimePassed(), time.monotonic())
        while True:
            for effect in effects:
                if isinstance(effect, BeginCall):
                    self._calls.submit(call, effect.ref, effect.deadline)
            if retry.done:
                break
            now = time.monotonic()
            try:
                ref, outcome = landed.get(timeout=max(0.0, min(retry.wake_at(now) - now, 1.0)))
            except queue.Empty:
                ref, outcome = None, None
            if cancellation.reason is not None:
                retry.handle(BatchCancelled(cancellation.reason), time.monotonic())
            if ref is None:
                event = TimePassed()
            elif isinstance(outcome, Received):
                report.views[ref] = outcome.view
                report._held.append(_OwnMemory(self._buffers, outcome))
                event = CallSucceeded(ref)
            elif isinstance(outcome, Failure):
                event = CallFailed(ref, outcome)
            else:
                broken = outcome
                cancellation.cancel(f"a call failed unexpectedly: {outcome!r}")
                retry.handle(BatchCancelled(f"a call failed unexpectedly: {outcome!r}"), time.monotonic())
                event = CallFailed(ref, Failure("cancelled", str(outcome)))
            effects = retry.handle(event, time.monotonic())
        if broken is not None:
            raise broken
        report.missing.update(retry.missing)

    def _way(self, ring: str, address: RingAddress | None) -> Carrier | Failure:
        if address is None:
            return Failure("unknown_ring", f"no address is known for ring {ring}")
        if ring not in self._carriers:
            try:
                carrier, why = self._choose(address)
            except PeerLost as error:
                return Failure("unreachable", str(error))
            log.info("payloads of ring %s come by %s (%s)", ring, carrier, why)
            self._carriers[ring] = carrier
        self._unused[ring] = 0
        return self._carriers[ring]

    def _choose(self, address: RingAddress) -> tuple[Carrier, str]:
        passed_over: list[str] = []
        for carrier in NEAREST_FIRST:
            if self._forced not in ("auto", carrier):
                continue
            try:
                self._prepare(carrier, address)
            except (Stale, Transient, ConfigError, RemoteProtocolError) as error:
                if self._forced != "auto" and isinstance(error, ConfigError):
                    raise ConfigError(f"carrier {carrier} was asked for, but {error}") from error
                passed_over.append(f"not {carrier}: {error}")
                continue
            return carrier, "; ".join(passed_over) or "nearest"
        raise PeerLost(f"ring {address.ring} cannot be reached: {'; '.join(passed_over)}")

    def _prepare(self, carrier: Carrier, address: RingAddress) -> None:
        """Make `carrier` ready for use with `address`, or raise why it cannot be."""
        if carrier == "shm":
            if self._forced == "auto" and address.host_id != self._host_id:
                raise Stale("it is on another host")
            self._readers[address.ring] = RingReader.attach(
                address, directory=self._directory, label=self._label, verify=self._verify
            )
            return
        if not (address.tcp_ports if carrier == "tcp" else address.ucxx_ports):
            raise ConfigError("the producer offers no port")
        if carrier in self._clients:
            return
        if carrier == "tcp":
            self._clients[carrier] = TcpClient(self._token, self._buffers, verify=self._verify)
        else:
            self._clients[carrier] = _ucxx_client(self._token, self._buffers, self._verify)

    def _detach_unused(self, addresses: dict[str, RingAddress]) -> None:
        for ring in list(self._carriers):
            self._unused[ring] = 0 if ring in addresses else self._unused[ring] + 1
            reader = self._readers.get(ring)
            if self._unused[ring] <= KEEP_UNUSED_FETCHES or (reader is not None and reader.leases):
                continue
            del self._carriers[ring], self._unused[ring]
            if reader is not None:
                del self._readers[ring]
                reader.close()


def _ucxx_client(token: str, buffers: Buffers, verify: bool) -> WireClient:
    try:
        from penstock.payload.io.ucxx_client import UcxxClient
    except ImportError as error:
        raise ConfigError("UCXX is not installed here (pip install 'penstock[ucxx]')") from error
    return UcxxClient(token, buffers, verify=verify)
