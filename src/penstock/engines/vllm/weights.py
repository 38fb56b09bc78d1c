"""Drives the weights of a vLLM server through its own calls: pause, start, update, finish, resume.

vLLM keeps its weights in its own process and overwrites them, so this is the in-place way with the same states: from
`start` on the replica is TORN until one complete version is loaded and verified. The server verifies its own memory
(`backend.MemoryCheck`): once a version was loaded completely, every bucket verified, the digest of the device memory is
stored, and compared whenever that version must be verified again. A server that answers an update with an error keeps
running but must not be resumed; one that dies or hangs is replaced.

The server copies a version from the trainer's memory if both use the same GPU (`weights.io.device`), else it reads the
version's files. If they are not visible on this host, they are fetched and written here first.

When the pool takes its devices, a server on a GPU moves its weights to host memory and drops its KV cache; on CPU it is
only paused. Either way its weights are verified before it resumes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch

from penstock.errors import LocalProtocolError, PeerLost, RemoteProtocolError, Transient
from penstock.records.weights import Manifest
from penstock.weights.io.device import is_on_a_device
from penstock.weights.io.files import FileTransport, Publisher, map_version
from penstock.weights.io.neighbours import WeightTransport
from penstock.weights.manifest import describe

LOST_S = 5.0
"""A connection breaks shortly before the exit code of the server can be read."""
LOOK_EVERY_S = 0.05
VERIFY_S = 60.0


class VllmEngine:
    """One server as the engine *and* the transport of a `ReplicaUpdater` with `way="in_place"`.

    engine = VllmEngine("path/of/the/socket", run_dir, home)
    ReplicaUpdater(engine, source, report, engine, way="in_place", verify=engine.served_digest)
    """

    def __init__(
        self,
        address: str,
        run_dir: Path,
        home: Path,
        *,
        label: Callable[[int, str], str] = lambda version, digest: str(version),
        exit_reason: Callable[[], str] = lambda: "",
        runs: Callable[[], bool] = lambda: True,
        timeout_s: float = 300.0,
    ) -> None:
        """`address` is the path of the server's socket; `home` a directory for versions that had to be fetched;
        `label` names a version and digest on the tokens drawn; `exit_reason` returns how the server ended; `runs` is
        False while there is no server, and so nothing to pause."""
        self._run_dir = run_dir
        self._home = home
        self._files = FileTransport(run_dir)
        self.elsewhere: WeightTransport = self._files
        """Fetches versions whose files are not visible on this host."""
        self._label = label
        self._exit_reason = exit_reason
        self._runs = runs
        # After an error the server closes the connection, but later: reusing it could lose the next call.
        transport = httpx.HTTPTransport(uds=address, limits=httpx.Limits(max_keepalive_connections=0))
        self._client = httpx.Client(transport=transport, base_url="http://vllm", timeout=timeout_s)
        self._fetched: dict[str, tuple[Path, Manifest]] = {}
        """By digest: the root of the newest version's files, and their manifest."""
        self._complete = ""
        """The digest of the last version that was loaded completely, also while the next one overwrites it."""
        self._loaded = -1
        """The version in the label of the weights that the server holds."""
        self._published_as: dict[tuple[int, str], int] = {}
        self._initialised = False
        self.resumed_at: float | None = time.monotonic()
        """When the last pause ended; None during a pause."""
        self._vacated = False
        self._moving = threading.Lock()
        """A cancelled order leaves its thread running: the next order waits for it."""
        self.version = -1
        self.digest = ""
        """Of the complete version it holds; empty from the first byte of another until that is verified."""

    def close(self) -> None:
        self._client.close()

    def __repr__(self) -> str:
        return f"VllmEngine({self._client.base_url}, version {self.version}, paused {self.resumed_at is None})"

    def forget(self) -> None:
        """The server was stopped: the next one holds no version."""
        self._initialised = self._vacated = False
        self.version, self.digest, self._complete = -1, "", ""

    # The transport's side

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        """The version's files, verified before the server is touched; the server reads them itself. A version in device
        memory is verified by the server."""
        root = self._run_dir
        if not self._files.has_files(manifest):
            root, manifest = self._home, self._copied(manifest, timeout_s)
        tensors = map_version(root, manifest, verify=verify and not is_on_a_device(root, manifest))
        self._fetched = {manifest.digest: (root, manifest)}
        return tensors

    def _copied(self, manifest: Manifest, timeout_s: float) -> Manifest:
        """The manifest of local copies of a version's files from another host."""
        tensors = self.elsewhere.fetch(manifest, timeout_s)
        copied = Publisher(self._home, manifest.lineage, keep=1).publish(manifest.version, tensors)
        if copied.digest != manifest.digest:
            raise RemoteProtocolError(f"the copy of {describe(manifest)} on this host differs: {describe(copied)}")
        return copied

    # The engine's side

    def sleep(self, timeout_s: float) -> None:
        """Requests in flight are kept and continue after `wake`."""
        if self._runs():
            self._call("POST", "/pause?mode=keep", timeout_s)
        self.resumed_at = None

    def load_in_place(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str, timeout_s: float) -> float:
        """One whole cycle in the server. It must be paused: updating a running server kills it."""
        if digest not in self._fetched or self.resumed_at is not None:
            raise LocalProtocolError(f"version {version} was not fetched, or the server is not paused: {self!r}")
        root, manifest = self._fetched[digest]
        began = time.monotonic()

        def left_s() -> float:
            return max(0.1, began + timeout_s - time.monotonic())

        if not self._initialised:
            self._call("POST", "/init_weight_transfer_engine", left_s(), init_info={})
            self._initialised = True
        self.digest = ""
        try:
            self._call("POST", "/start_weight_update", left_s())
        except RemoteProtocolError as error:
            if "already active" not in str(error):
                raise
            # An earlier update was begun and its reply lost. Its layers may be processed already: start a new one.
            self._call("POST", "/finish_weight_update", left_s())
            self._call("POST", "/start_weight_update", left_s())
        update = {"root": str(root), "manifest": msgspec.to_builtins(manifest)}
        self._call("POST", "/update_weights", left_s(), update_info=update)
        self._call("POST", "/finish_weight_update", left_s(), weight_version=self._label(version, digest))
        self._verify("penstock_loaded", left_s(), digest, self._complete)
        self._complete = digest
        self.version, self.digest = version, digest
        self._loaded = version
        self._published_as.pop((version, digest), None)
        return time.monotonic() - began

    def relabel(self, version: int, timeout_s: float) -> None:
        """The server keeps labelling tokens with the version that it loaded: see `published_as`."""
        self._published_as[self._loaded, self.digest] = self.version = version
        while len(self._published_as) > 8:
            del self._published_as[next(iter(self._published_as))]

    def published_as(self, version: int, digest: str) -> int:
        """For the version in a server's label, the last version that was published with the same bytes."""
        return self._published_as.get((version, digest), version)

    def wake(self, timeout_s: float) -> None:
        self._call("POST", "/resume", timeout_s)
        self.resumed_at = time.monotonic()

    # The pool's side

    def vacate(self, timeout_s: float) -> None:
        """Frees device memory as far as the server can."""
        with self._moving:
            self._call("POST", "/sleep?level=1&mode=keep", timeout_s)
            self.resumed_at, self._vacated = None, True

    def occupy(self, timeout_s: float) -> None:
        """Back on the devices, with the weights it had, verified; a server without weights stays paused. Idempotent."""
        with self._moving:
            if not self._vacated:
                return
            self._call("POST", "/wake_up", timeout_s)
            if not self.digest:
                self._call("POST", "/pause?mode=keep", timeout_s)
            elif self.served_digest() != self.digest:
                raise PeerLost(f"the vLLM server's weights changed while it was asleep: {self!r}")
            self.resumed_at, self._vacated = time.monotonic() if self.digest else None, False

    def check_vacated(self, timeout_s: float) -> None:
        """PeerLost unless the server reports that it is off its devices."""
        if not self._call("GET", "/is_sleeping", timeout_s)["is_sleeping"]:
            raise PeerLost(f"the vLLM server is awake instead of asleep: {self!r}")

    # Verification

    def served_digest(self) -> str:
        """The digest of the loaded version if the server's memory is unchanged since; else empty."""
        if not self._complete:
            return ""
        try:
            self._verify("penstock_holds", VERIFY_S, self._complete)
        except RemoteProtocolError:  # also when half loaded: some layers have no data, and no digest
            return ""
        return self._complete

    def _verify(self, method: str, timeout_s: float, *digests: str) -> None:
        """RemoteProtocolError unless it succeeds in every process of the server: see `backend.MemoryCheck`."""
        self._call("POST", "/collective_rpc", timeout_s, method=method, args=digests)

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        raise LocalProtocolError("a vLLM server does not expose its tensors: pass `verify=engine.served_digest`")

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        raise LocalProtocolError("a vLLM server has no second buffer: use way='in_place'")

    def staged_tensors(self) -> Mapping[str, torch.Tensor]:
        raise LocalProtocolError("a vLLM server has no second buffer: use way='in_place'")

    def swap(self, version: int, digest: str, timeout_s: float) -> float:
        raise LocalProtocolError("a vLLM server has no second buffer: use way='in_place'")

    def _call(self, verb: str, path: str, timeout_s: float, **body: Any) -> Any:
        try:
            reply = self._client.request(verb, path, json=body or None, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise PeerLost(f"the vLLM server did not answer {path} within {timeout_s:.0f} s") from error
        except httpx.TransportError as error:
            deadline = time.monotonic() + LOST_S
            while not (exit_reason := self._exit_reason()) and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY_S)
            if exit_reason:
                raise PeerLost(f"the vLLM server {exit_reason}") from error
            raise Transient(f"the vLLM server cannot be reached at {path}: {error}") from error
        if reply.is_error:
            raise RemoteProtocolError(f"the vLLM server answered {path} with {reply.status_code}: {reply.text[:300]}")
        return reply.json()
