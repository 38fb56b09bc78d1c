"""Fetching the next batches in the background, each kept under its own key until that key is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from penstock.errors import LocalProtocolError, Transient
from penstock.payload.io.fetch import BatchFetcher, FetchReport
from penstock.payload.io.received import Cancellation
from penstock.records.payload import PayloadRef, RingAddress

K = TypeVar("K", bound=Hashable)


class _Fetch:
    def __init__(self) -> None:
        self.cancellation = Cancellation()
        self.ended = threading.Event()
        self.report: FetchReport | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread


class Prefetcher(Generic[K]):
    """Batches by key (the step, say). A result that comes late can never be handed out under another key."""

    def __init__(self, fetcher: BatchFetcher) -> None:
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._fetches: dict[K, _Fetch] = {}
        self._closed = False

    def __repr__(self) -> str:
        going_on = [key for key, fetch in self._fetches.items() if not fetch.ended.is_set()]
        return f"<Prefetcher batches {list(self._fetches)}, of which {going_on} are going on>"

    def begin(self, key: K, refs: Iterable[PayloadRef], rings: Sequence[RingAddress]) -> None:
        """Start to fetch in the background. `LocalProtocolError` when this key was begun and not yet taken."""
        fetch = _Fetch()
        fetch.thread = threading.Thread(
            target=self._run, args=(fetch, list(refs), rings), name="payload-prefetch", daemon=True
        )
        with self._lock:
            if self._closed or key in self._fetches:
                raise LocalProtocolError(
                    f"batch {key} is {'refused: closed' if self._closed else 'being fetched already'}"
                )
            self._fetches[key] = fetch
        fetch.thread.start()

    def wait(self, key: K, timeout_s: float) -> FetchReport:
        """The report of exactly this batch. `Transient` when it is not there in time: wait again, or `cancel`."""
        with self._lock:
            fetch = self._fetches.get(key)
        if fetch is None:
            raise LocalProtocolError(f"batch {key} was not begun, or was taken or cancelled before")
        if not fetch.ended.wait(timeout_s):
            raise Transient(f"the payloads of batch {key} have not all arrived within {timeout_s} s")
        with self._lock:
            if self._fetches.get(key) is not fetch:
                raise LocalProtocolError(f"batch {key} was taken or cancelled by another thread")
            del self._fetches[key]
        if fetch.error is not None:
            raise fetch.error
        assert fetch.report is not None
        return fetch.report

    def cancel(self, key: K, reason: str = "not wanted any more") -> None:
        """Break off and forget a batch; what had arrived is released."""
        with self._lock:
            fetch = self._fetches.pop(key, None)
        if fetch is not None:
            fetch.cancellation.cancel(reason)
            if fetch.ended.is_set() and fetch.report is not None:
                fetch.report.released()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel everything and wait for the threads, `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            fetches = dict(self._fetches)
        for key in fetches:
            self.cancel(key, "the prefetcher is closing")
        for fetch in fetches.values():
            fetch.thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, fetch: _Fetch, refs: list[PayloadRef], rings: Sequence[RingAddress]) -> None:
        try:
            fetch.report = self._fetcher.fetch(refs, rings, fetch.cancellation)
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            fetch.error = error
        with self._lock:
            forgotten = not any(other is fetch for other in self._fetches.values())
            fetch.ended.set()
        if forgotten and fetch.report is not None:
            fetch.report.released()
