"""The rendezvous of the trainer and its replicas for a broadcast: keys in the trainer's store.

    replica   request ─▶ wait for an invitation ─▶ join the group ─▶ receive and verify ─▶ confirm
    trainer   first request ─▶ wait for others ─▶ invite all requests ─▶ join ─▶ send ─▶ wait for confirmations

A group consists of the replicas that request the version at that moment, so membership is never stale. A replica uses
its fallback transport if the version was overtaken, if it is not invited in time, or if its group fails: a death
during a broadcast costs this one transfer. The served weights are not touched.

The answer to a request is written once: `TAKEN` by the trainer before it invites, or `WITHDRAWN` by the replica. So a
replica that has left is neither invited nor waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.errors import Aborted, PeerLost, PenstockError, RemoteProtocolError, Stale
from penstock.records.ids import Version
from penstock.records.section import LOOPBACK
from penstock.records.weights import Manifest
from penstock.weights.io.collective import BroadcastReceiver, BroadcastSender, Invitation
from penstock.weights.io.neighbours import WeightTransport
from penstock.weights.io.store import StoreClient
from penstock.weights.manifest import check_manifest, describe

logger = logging.getLogger(__name__)

POLL_EVERY_S = 0.005
IDLE_POLL_EVERY_S = 0.02
GATHER_S = 0.5
"""How long the first request waits for others."""
CONFIRM_S = 10.0
"""How long a replica may take to verify what it received."""

PRESENT = "present"
"""Key of the version that is broadcast at present: no replica is invited to an older one."""
TAKEN = "taken"
"""Answer of the trainer: the invitation follows."""
WITHDRAWN = "withdrawn"


def _asked(digest: str) -> str:
    return f"{digest}/asked"


def _answer(digest: str, number: int) -> str:
    return f"{digest}/answer/{number}"


def _write_once(store: Store, key: str, answer: str) -> bool:
    """Writes the answer if there is none yet; returns whether it is the valid one."""
    return store.compare_set(key, "", answer) == answer.encode()


def _confirmed(name: str, rank: int) -> str:
    return f"{name}/confirmed/{rank}"


class BroadcastHost:
    """The trainer's side: a thread that invites and sends. Only the newest version is broadcast."""

    def __init__(
        self,
        run_dir: Path,
        token: bytes,
        *,
        host: str = LOOPBACK,
        expected: int = 0,
        build_timeout_s: float = 10.0,
        send_timeout_s: float = 300.0,
    ) -> None:
        """Once `expected` replicas have requested a version, it is sent without waiting for more."""
        self._sender = BroadcastSender(run_dir, token, host)
        self._expected = expected
        self._build_timeout_s, self._send_timeout_s = build_timeout_s, send_timeout_s
        self._groups = 0
        self._newest: Manifest | None = None
        self._answered = ("", 0)
        """Digest of a version, and the number up to which all requests for it are answered."""
        self._closing = threading.Event()
        self.sent = 0
        """Broadcasts that all replicas confirmed."""
        self.broken = 0
        self._sender.store.set(PRESENT, "-1")
        first = self._sender.invitation("", 0, 1)
        self.address = f"{first.host}:{first.port}"
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"BroadcastHost({self.address}, {self.sent} sent, {self.broken} broken)"

    def offer(self, manifest: Manifest) -> None:
        """Broadcasts this version from now on; replicas that wait for an older one withdraw."""
        self._newest = manifest

    def close(self, timeout_s: float) -> None:
        """Ends the thread; one that is inside a group at the deadline ends with the process."""
        self._closing.set()
        self._sender.store.close(timeout_s / 2)
        self._thread.join(timeout_s / 2)

    def _run(self) -> None:
        present = Version(-1)
        while not self._closing.wait(IDLE_POLL_EVERY_S):
            newest = self._newest
            if newest is None:
                continue
            if newest.version != present:
                present = newest.version
                self._sender.store.set(PRESENT, str(present))
            if self._waiting(newest.digest):
                self._gather(newest)

    def _waiting(self, digest: str) -> list[int]:
        """Numbers of the requests that have no answer yet."""
        store, (current, answered) = self._sender.store, self._answered
        first = answered + 1 if current == digest else 1
        requests = store.add(_asked(digest), 0)
        return [number for number in range(first, requests + 1) if not store.check([_answer(digest, number)])]

    def _gather(self, manifest: Manifest) -> None:
        until, digest, store = time.monotonic() + GATHER_S, manifest.digest, self._sender.store
        while time.monotonic() < until and not self._closing.is_set():
            if len(self._waiting(digest)) >= self._expected > 0:
                break
            time.sleep(POLL_EVERY_S)
        waiting = self._waiting(digest)
        taken = [number for number in waiting if _write_once(store, _answer(digest, number), TAKEN)]
        self._answered = (digest, max(waiting, default=0))
        if taken:
            self._broadcast(manifest, taken)

    def _broadcast(self, manifest: Manifest, requests: list[int]) -> None:
        """One attempt: replicas that it does not reach use their fallback transport."""
        self._groups += 1
        name = f"version-{manifest.version}-group-{self._groups}"
        for rank, number in enumerate(requests, 1):
            invitation = self._sender.invitation(name, rank, len(requests) + 1)
            self._sender.store.set(_answer(manifest.digest, number), msgspec.json.encode(invitation).decode())
        timeouts = {"build_timeout_s": self._build_timeout_s, "send_timeout_s": self._send_timeout_s}
        try:
            self._sender.send(name, manifest, len(requests), **timeouts)
        except PenstockError as error:
            problem = str(error)
        else:
            unconfirmed = self._await_confirmations(name, len(requests))
            problem = f"{unconfirmed} of them did not confirm within {CONFIRM_S:.0f} s" if unconfirmed else ""
        if problem:
            self.broken += 1
            logger.warning("%s was not broadcast to %d replicas: %s", describe(manifest), len(requests), problem)
        else:
            self.sent += 1

    def _await_confirmations(self, name: str, count: int) -> int:
        """Returns the number of confirmations that did not arrive in time."""
        until = time.monotonic() + CONFIRM_S
        missing = set(range(1, count + 1))
        while missing and time.monotonic() < until and not self._closing.is_set():
            missing -= {rank for rank in missing if self._sender.store.check([_confirmed(name, rank)])}
            time.sleep(POLL_EVERY_S)
        return len(missing)


class BroadcastTransport:
    """A replica's side: takes part in broadcasts, and fetches the version by `fallback` if that fails.

    Tensors are valid until the next `fetch`.
    """

    def __init__(self, member: str, fallback: WeightTransport, token: bytes, *, invite_timeout_s: float = 10.0) -> None:
        self._member = member
        self._token = token
        self._fallback = fallback
        self._invite_timeout_s = invite_timeout_s
        self._receiver = BroadcastReceiver(token)
        self._store: tuple[str, Store] | None = None
        self.received = 0
        self.fallbacks = 0

    def __repr__(self) -> str:
        return f"BroadcastTransport({self._member}, {self.received} received, {self.fallbacks} by fallback)"

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        """A version received by broadcast is always verified: hashing what has just arrived costs little."""
        check_manifest(manifest)
        began = time.monotonic()
        if manifest.meeting:
            try:
                tensors = self._receive(manifest, timeout_s / 2)
            except Stale as error:  # normal if the trainer is faster than its replicas
                logger.debug("%s is fetched by the fallback transport: %s", describe(manifest), error)
            except (Aborted, PeerLost, RemoteProtocolError) as error:
                self._store = None
                logger.warning("%s could not be broadcast to this replica: %s", describe(manifest), error)
            else:
                self.received += 1
                if self.received == 1:
                    logger.info("versions are received by broadcast from %s", manifest.meeting)
                return tensors
        self.fallbacks += 1
        left_s = max(1.0, timeout_s - (time.monotonic() - began))
        return self._fallback.fetch(manifest, left_s, verify=verify)

    def _receive(self, manifest: Manifest, timeout_s: float) -> Mapping[str, torch.Tensor]:
        until = time.monotonic() + timeout_s
        with _as_aborted(manifest):
            store = self._connect(manifest)
            number = store.add(_asked(manifest.digest), 1)
            invitation = self._invited(store, manifest, number)
            tensors = self._receiver.receive(
                invitation,
                manifest,
                build_timeout_s=min(self._invite_timeout_s, timeout_s),
                receive_timeout_s=max(1.0, until - time.monotonic()),
            )
            store.set(_confirmed(invitation.name, invitation.rank), "")
        return tensors

    def _connect(self, manifest: Manifest) -> Store:
        if self._store is not None and self._store[0] == manifest.meeting:
            return self._store[1]
        host, _, port = manifest.meeting.rpartition(":")
        if not host or not port.isdigit():
            raise RemoteProtocolError(f"{describe(manifest)} names meeting {manifest.meeting!r}, expected host:port")
        store = StoreClient(host, int(port), self._token, self._invite_timeout_s)
        self._store = (manifest.meeting, store)
        return store

    def _invited(self, store: Store, manifest: Manifest, number: int) -> Invitation:
        until = time.monotonic() + self._invite_timeout_s
        key = _answer(manifest.digest, number)
        while True:
            answer = store.get(key) if store.check([key]) else b""
            if answer not in (b"", TAKEN.encode()):
                return msgspec.json.decode(answer, type=Invitation)
            if not answer and manifest.version < int(store.get(PRESENT)) and _write_once(store, key, WITHDRAWN):
                raise Stale(f"{manifest.meeting} broadcasts a newer version")
            if time.monotonic() > until and (answer or _write_once(store, key, WITHDRAWN)):
                raise Aborted(f"{manifest.meeting} did not invite this replica within {self._invite_timeout_s:.0f} s")
            time.sleep(POLL_EVERY_S)


@contextmanager
def _as_aborted(manifest: Manifest) -> Iterator[None]:
    """Converts what the store's client and sockets raise when the trainer is gone."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise Aborted(f"the broadcast store at {manifest.meeting} failed: {error}") from error
