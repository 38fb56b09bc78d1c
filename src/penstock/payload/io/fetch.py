"""Fetches a batch: every payload over the nearest transport, and an exact reason for each missing one."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.errors import Aborted, ConfigError, LocalProtocolError, PeerLost, RemoteProtocolError, Stale, Transient
from penstock.payload.io.consumption import Consumption
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.reader import Lease, RingReader
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.tcp_client import TcpWire
from penstock.payload.io.wire_client import Wire, WireClient
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
from penstock.payload.settings import PayloadSection
from penstock.records.payload import PayloadRef, RingAddress
from penstock.runtime.clock import monotonic, wait_for
from penstock.runtime.offload import Offload

log = logging.getLogger(__name__)

Transport = Literal["shm", "tcp", "ucxx"]
NEAREST_FIRST: tuple[Transport, ...] = ("shm", "ucxx", "tcp")

CLOSE_S = 10.0
CONFIRM_S = 2.0
"""On close, for producers that may be gone already."""
KEEP_UNUSED_FETCHES = 16
"""A ring that is absent from more than this number of fetches in a row is detached."""


class Holding(Protocol):
    """The payloads of one ring in one batch. Exactly one of the methods is called, again if it raised `Transient`."""

    def consumed(self) -> int: ...

    def released(self) -> None: ...


@dataclass
class _Mapped:
    """Read in place: the leases keep the payloads in the ring."""

    reader: RingReader
    leases: list[Lease]

    def consumed(self) -> int:
        return self.reader.finalise(self.leases, "consume")

    def released(self) -> None:
        self.reader.finalise(self.leases, "release")


@dataclass
class _Copied:
    """Received over a wire into local memory; the originals stay in the ring until the producer has freed them."""

    buffers: Buffers
    consumption: Consumption
    client: WireClient
    address: RingAddress
    received: dict[PayloadRef, Received] = field(default_factory=dict)

    def consumed(self) -> int:
        self.released()
        if self.received:
            self.consumption.add(self.client, self.address, list(self.received))
        return 0

    def released(self) -> None:
        for received in self.received.values():
            self.buffers.release(received.memory)


class FetchReport:
    """The payloads of one batch, and the missing ones with the reason.

    The views are valid until `consumed` (the batch was trained: its payloads may be overwritten) or `released` (it was
    not: they can be fetched again). Exactly one of the two must be called. If the trainer is killed before, all
    payloads can be fetched again.
    """

    def __init__(self) -> None:
        self.views: dict[PayloadRef, memoryview] = {}
        self.missing: dict[PayloadRef, Failure] = {}
        self._holdings: list[Holding] = []

    def __repr__(self) -> str:
        state = f"{len(self._holdings)} rings held" if self._holdings else "nothing held"
        return f"<FetchReport {len(self.views)} payloads, {len(self.missing)} missing, {state}>"

    def hold(self, holding: Holding) -> None:
        self._holdings.append(holding)

    def consumed(self) -> int:
        """Frees all payloads; returns how many of them another reader had taken over.

        Remote producers are notified in the background. Raises `Transient` if slots are locked by another process: the
        payloads of their rings are kept, and the call can be repeated.
        """
        return self._end(lambda holding: holding.consumed())

    def released(self) -> None:
        """Releases all payloads unused; raises as `consumed` does."""
        self._end(lambda holding: holding.released())

    def _end(self, end: Callable[[Holding], int | None]) -> int:
        holdings, self._holdings = self._holdings, []
        locked: Transient | None = None
        orphans = 0
        for holding in holdings:
            try:
                orphans += end(holding) or 0
            except Transient as error:
                self._holdings.append(holding)
                locked = error
        if locked is not None:
            raise locked
        return orphans


class BatchFetcher:
    """Fetches batches for one trainer process. Blocking and thread-safe; call it from a worker thread.

    Payloads on the same host are read in place. Others are fetched over UCXX if the producer offers it and it is
    installed here, else over TCP. `transport` overrides the choice for all rings.
    """

    def __init__(
        self,
        *,
        host_id: str,
        token: str = "",
        label: str = "trainer",
        directory: str = DIRECTORY,
        verify: bool = True,
        transport: Transport | Literal["auto"] = PayloadSection().transport,
        policy: RetryPolicy | None = None,
        buffers: Buffers | None = None,
        wires: Mapping[Transport, Callable[[], Wire]] | None = None,
        threads: Callable[[int, str], Offload] = Offload,
    ) -> None:
        self._host_id = host_id
        self._token = token
        self._label = label
        self._directory = directory
        self._verify = verify
        self._forced = transport
        self._policy = policy or RetryPolicy()
        self._buffers = buffers or Buffers()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._readers: dict[str, RingReader] = {}
        self._unused: dict[str, int] = {}
        self._transports: dict[str, Transport] = {}
        self._clients: dict[Transport, WireClient] = {}
        self._wires = wires or WIRES
        self._threads = threads
        self._consumption = Consumption(threads)
        self._running: set[Cancellation] = set()
        self._closed = False
        self._calls: Offload | None = None
        """Created with the first wire client: payloads on the same host need none."""

    def __repr__(self) -> str:
        return f"<BatchFetcher {self._label}, transports {self._transports}>"

    def fetch(
        self, refs: Iterable[PayloadRef], rings: Sequence[RingAddress], cancellation: Cancellation | None = None
    ) -> FetchReport:
        """Fetches all payloads of `refs` from the rings at the addresses `rings`, within the policy's deadlines."""
        addresses = {address.ring: address for address in rings}
        by_ring: dict[str, list[PayloadRef]] = {}
        for ref in dict.fromkeys(refs):
            by_ring.setdefault(ref.ring, []).append(ref)
        report = FetchReport()
        remote: dict[PayloadRef, _Copied] = {}
        try:
            with self._lock:
                if self._closed:
                    raise LocalProtocolError("this fetcher is closed")
                self._detach_unused(addresses)
                for ring, ring_refs in by_ring.items():
                    transport = self._transport_of(ring, addresses.get(ring))
                    if isinstance(transport, Failure):
                        report.missing |= dict.fromkeys(ring_refs, transport)
                    elif transport == "shm":
                        self._take(self._readers[ring], ring_refs, report)
                    else:
                        copied = _Copied(self._buffers, self._consumption, self._clients[transport], addresses[ring])
                        report.hold(copied)
                        remote |= dict.fromkeys(ring_refs, copied)
            if remote:
                self._fetch_remote(remote, report, cancellation or Cancellation())
        except BaseException:
            try:
                report.released()
            except Transient as error:
                log.warning("payloads of a failed fetch stay taken: %s", error)
            raise
        return report

    def close(self) -> None:
        """Cancels fetches, reports used payloads to producers, detaches from all rings and closes all connections.

        Payloads not consumed stay readable by others.
        """
        with self._lock:
            self._closed = True
            running = list(self._running)
        for cancellation in running:
            cancellation.cancel("the fetcher is closing")
        with self._lock:
            wait_for(self._ended, lambda: not self._running, CLOSE_S)
        if self._calls is not None:
            self._calls.close(CLOSE_S)
        self._consumption.close(CONFIRM_S)
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            for client in self._clients.values():
                client.close()
            self._readers.clear()
            self._clients.clear()

    def _take(self, reader: RingReader, refs: list[PayloadRef], report: FetchReport) -> None:
        try:
            taken = dict(zip(refs, reader.take_all(refs), strict=True))
        except Transient as error:
            report.missing |= dict.fromkeys(refs, Failure("busy", str(error)))
            return
        leases = [lease for lease in taken.values() if isinstance(lease, Lease)]
        report.hold(_Mapped(reader, leases))
        report.views |= {lease.ref: lease.view for lease in leases}
        report.missing |= {ref: Failure("stale", str(why)) for ref, why in taken.items() if isinstance(why, Stale)}

    def _fetch_remote(
        self,
        copies: dict[PayloadRef, _Copied],
        report: FetchReport,
        cancellation: Cancellation,
    ) -> None:
        if cancellation.reason is not None:
            raise Aborted(cancellation.reason)
        with self._lock:
            self._running.add(cancellation)
        try:
            self._call_all(copies, report, cancellation)
        finally:
            with self._lock:
                self._running.discard(cancellation)
                self._ended.notify_all()

    def _call_all(
        self,
        copies: dict[PayloadRef, _Copied],
        report: FetchReport,
        cancellation: Cancellation,
    ) -> None:
        retry = BatchRetry(copies, self._policy, monotonic())
        ended: deque[tuple[PayloadRef, Received | Failure | BaseException]] = deque()
        call_ended = threading.Condition()
        assert self._calls is not None
        tried: dict[PayloadRef, set[int]] = {}

        def call(ref: PayloadRef, deadline: float) -> None:
            ring = copies[ref]
            ports = tried.setdefault(ref, set())
            try:
                outcome = ring.client.read(ring.address, ref, deadline, ports, cancellation)
            except Exception as error:  # noqa: BLE001  raised again by the waiting thread
                outcome = error
            with call_ended:
                ended.append((ref, outcome))
                call_ended.notify()

        broken: BaseException | None = None
        effects = retry.handle(TimePassed(), monotonic())
        while True:
            for effect in effects:
                if isinstance(effect, BeginCall):
                    self._calls.submit(call, effect.ref, effect.deadline)
            if retry.done:
                break
            now = monotonic()
            with call_ended:
                wait_for(call_ended, lambda: bool(ended), max(0.0, min(retry.wake_at(now) - now, 1.0)))
                ref, outcome = ended.popleft() if ended else (None, None)
            if cancellation.reason is not None:
                retry.handle(BatchCancelled(cancellation.reason), monotonic())
            if ref is None:
                event = TimePassed()
            elif isinstance(outcome, Received):
                report.views[ref] = outcome.view
                copies[ref].received[ref] = outcome
                event = CallSucceeded(ref)
            elif isinstance(outcome, Failure):
                event = CallFailed(ref, outcome)
            else:
                broken = outcome
                cancellation.cancel(f"a call failed unexpectedly: {outcome!r}")
                retry.handle(BatchCancelled(f"a call failed unexpectedly: {outcome!r}"), monotonic())
                event = CallFailed(ref, Failure("cancelled", str(outcome)))
            effects = retry.handle(event, monotonic())
        if broken is not None:
            raise broken
        report.missing.update(retry.missing)

    def _transport_of(self, ring: str, address: RingAddress | None) -> Transport | Failure:
        if address is None:
            return Failure("unknown_ring", f"no address was passed for ring {ring}")
        if ring not in self._transports:
            try:
                transport, why = self._choose(address)
            except PeerLost as error:
                return Failure("unreachable", str(error))
            log.info("payloads of ring %s are fetched over %s (%s)", ring, transport, why)
            self._transports[ring] = transport
        self._unused[ring] = 0
        return self._transports[ring]

    def _choose(self, address: RingAddress) -> tuple[Transport, str]:
        passed_over: list[str] = []
        for transport in NEAREST_FIRST:
            if self._forced not in ("auto", transport):
                continue
            try:
                self._prepare(transport, address)
            except (Stale, Transient, ConfigError, RemoteProtocolError) as error:
                if self._forced != "auto" and isinstance(error, ConfigError):
                    raise ConfigError(f"transport {transport} was requested, but {error}") from error
                passed_over.append(f"not {transport}: {error}")
                continue
            return transport, "; ".join(passed_over) or "nearest"
        raise PeerLost(f"ring {address.ring} cannot be reached: {'; '.join(passed_over)}")

    def _prepare(self, transport: Transport, address: RingAddress) -> None:
        """Prepares `transport` for `address`; raises if it cannot be used."""
        if transport == "shm":
            if self._forced == "auto" and address.host_id != self._host_id:
                raise Stale("it is on another host")
            self._readers[address.ring] = RingReader.attach(
                address, directory=self._directory, label=self._label, verify=self._verify
            )
            return
        if not (address.tcp_ports if transport == "tcp" else address.ucxx_ports):
            raise ConfigError("the producer offers no port")
        if transport in self._clients:
            return
        self._clients[transport] = WireClient(self._wires[transport](), self._token, self._buffers, verify=self._verify)
        if self._calls is None:
            self._calls = self._threads(self._policy.concurrency, "payload-call")

    def _detach_unused(self, addresses: dict[str, RingAddress]) -> None:
        for ring in list(self._transports):
            self._unused[ring] = 0 if ring in addresses else self._unused[ring] + 1
            reader = self._readers.get(ring)
            if self._unused[ring] <= KEEP_UNUSED_FETCHES or (reader is not None and reader.leases):
                continue
            del self._transports[ring], self._unused[ring]
            if reader is not None:
                del self._readers[ring]
                reader.close()


def _ucxx_wire() -> Wire:
    try:
        from penstock.payload.io.ucxx_client import UcxxWire
    except ImportError as error:
        raise ConfigError("UCXX is not installed here (pip install 'penstock-rl[ucxx]')") from error
    return UcxxWire()


WIRES: Mapping[Transport, Callable[[], Wire]] = {"tcp": TcpWire, "ucxx": _ucxx_wire}
