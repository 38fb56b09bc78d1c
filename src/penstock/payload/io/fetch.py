"""Fetching a batch: every payload by the nearest way, and an exact reason for each one that could not be had."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from penstock.errors import PenstockError, Stale
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.shm import Lease, RingReader
from penstock.records.payload import PayloadRef, RingAddress

Reason = Literal["stale", "unreachable", "unknown_ring"]

KEEP_UNUSED_FETCHES = 16
"""A ring that this many fetches did not mention is detached."""


class Missing(NamedTuple):
    """Why one payload could not be had."""

    reason: Reason
    detail: str


class FetchReport:
    """The payloads of one batch, and what is missing.

    The views stay good until `consumed` (the batch was trained: the memory may be reused) or `released` (it was not:
    the payloads can be fetched again). Exactly one of the two must be called.
    """

    def __init__(self, views: dict[PayloadRef, memoryview], missing: dict[PayloadRef, Missing], leases: list[Lease]):
        self.views = views
        self.missing = missing
        self._leases = leases

    def __repr__(self) -> str:
        return f"<FetchReport {len(self.views)} payloads, {len(self.missing)} missing, {len(self._leases)} leases held>"

    def consumed(self) -> int:
        """Give the memory back; how many payloads had been taken over by another reader in the meantime."""
        leases, self._leases = self._leases, []
        return sum(not lease.consumed() for lease in leases)

    def released(self) -> None:
        """Let the payloads be fetched again."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.released()


class BatchFetcher:
    """Fetches batches for one trainer process. Blocking and thread-safe; call it from a worker thread."""

    def __init__(
        self, *, host_id: str, label: str = "trainer", directory: str = DIRECTORY, verify: bool = True
    ) -> None:
        self._host_id = host_id
        self._label = label
        self._directory = directory
        self._verify = verify
        self._lock = threading.Lock()
        self._readers: dict[str, RingReader] = {}
        self._idle: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<BatchFetcher {self._label}, {len(self._readers)} rings attached>"

    def fetch(self, refs: Iterable[PayloadRef], rings: Sequence[RingAddress]) -> FetchReport:
        """Get every payload named in `refs`, from the rings that `rings` says how to reach."""
        addresses = {address.ring: address for address in rings}
        views: dict[PayloadRef, memoryview] = {}
        missing: dict[PayloadRef, Missing] = {}
        leases: list[Lease] = []
        with self._lock:
            self._detach_unused(addresses)
            for ref in dict.fromkeys(refs):
                address = addresses.get(ref.ring)
                if address is None:
                    missing[ref] = Missing("unknown_ring", f"no address is known for ring {ref.ring}")
                    continue
                try:
                    lease = self._reader(address).take(ref)
                except Stale as error:
                    missing[ref] = Missing("stale", str(error))
                except PenstockError as error:
                    missing[ref] = Missing("unreachable", str(error))
                else:
                    leases.append(lease)
                    views[ref] = lease.view
        return FetchReport(views, missing, leases)

    def close(self) -> None:
        """Detach from all rings; payloads not consumed stay readable by others."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _reader(self, address: RingAddress) -> RingReader:
        reader = self._readers.get(address.ring)
        if reader is None:
            reader = RingReader.attach(address, directory=self._directory, label=self._label, verify=self._verify)
            self._readers[address.ring] = reader
        self._idle[address.ring] = 0
        return reader

    def _detach_unused(self, addresses: dict[str, RingAddress]) -> None:
        for ring, reader in list(self._readers.items()):
            self._idle[ring] = 0 if ring in addresses else self._idle[ring] + 1
            if self._idle[ring] > KEEP_UNUSED_FETCHES and reader.leases == 0:
                del self._readers[ring], self._idle[ring]
                reader.close()
