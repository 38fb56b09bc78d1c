"""Broadcasts a version's buckets through torch.distributed with gloo.

Every wait has a deadline: reaching the store, building the group, each bucket. A group that failed is aborted and
never reused. Received bytes are kept apart from the served weights, and are verified.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.errors import Aborted, PeerLost
from penstock.records.section import LOOPBACK
from penstock.records.weights import Manifest
from penstock.weights.buckets import layout
from penstock.weights.io.digest import tensor_digest
from penstock.weights.io.fetch import check_digests, tensor_at
from penstock.weights.io.files import FileSource
from penstock.weights.io.store import KeyStore, StoreClient, StoreServer
from penstock.weights.manifest import check_manifest, describe

_JOINED = "here"


class Invitation(msgspec.Struct, frozen=True):
    """The data that a participant needs to join its group."""

    name: str
    host: str
    port: int
    rank: int
    """0 is the sender."""
    size: int


class Group:
    """The process group of one broadcast. If it fails, or a member does not join (`PeerLost`), nothing was changed."""

    def __init__(self, invitation: Invitation, timeout_s: float, store: KeyStore) -> None:
        self._invitation = invitation
        self._store = store  # torch keeps no reference to the Python part of a store
        deadline = time.monotonic() + timeout_s
        try:
            own = PrefixStore(invitation.name, store)
            own.set(f"{_JOINED}/{invitation.rank}", "1")
            self._wait_for_all(own, deadline)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
            options._devices = [_listening_on(store.local_host)]
            self._group: Any = dist.ProcessGroupGloo(own, invitation.rank, invitation.size, options)
        except (RuntimeError, OSError) as error:
            raise Aborted(f"group {invitation.name} could not be built: {error}") from error

    def _wait_for_all(self, store: PrefixStore, deadline: float) -> None:
        """`PeerLost` names the missing ranks, which torch would not do."""
        missing = list(range(self._invitation.size))
        while missing:
            missing = [rank for rank in missing if not store.check([f"{_JOINED}/{rank}"])]
            if missing and time.monotonic() > deadline:
                raise PeerLost(f"ranks {missing} did not join group {self._invitation.name} in time")
            if missing:
                time.sleep(0.005)

    def broadcast(self, flat: torch.Tensor, timeout_s: float) -> None:
        """Sends rank 0's bytes to all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        try:
            self._group.broadcast([flat], options).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise Aborted(f"group {self._invitation.name} broke: {error}") from error

    def close(self) -> None:
        """Leaves the group, in any state; peers that still wait fail at once."""
        self._group.abort()


class BroadcastSender:
    """The trainer's side: hosts the store, and sends versions from their files."""

    def __init__(self, run_dir: Path, token: bytes, host: str = LOOPBACK, timeout_s: float = 60.0) -> None:
        self._run_dir = run_dir
        self._host = host
        self.store = StoreServer(token, host=host, timeout_s=timeout_s)

    def invitation(self, name: str, rank: int, size: int) -> Invitation:
        return Invitation(name, self._host, self.store.port, rank, size)

    def send(
        self, name: str, manifest: Manifest, receivers: int, *, build_timeout_s: float, send_timeout_s: float
    ) -> None:
        """Builds the group and sends every bucket. `PeerLost` names missing ranks; `Aborted` if the group failed."""
        group = Group(self.invitation(name, 0, receivers + 1), build_timeout_s, self.store)
        deadline = time.monotonic() + send_timeout_s
        try:
            with FileSource(self._run_dir, manifest) as source:
                for index, bucket in enumerate(manifest.buckets):
                    mapped = torch.from_numpy(np.frombuffer(source.map(index), dtype=np.uint8))
                    data = mapped[len(layout(bucket.tensors).header) :]
                    if data.numel():
                        group.broadcast(data, _left_s(deadline, manifest))
        finally:
            group.close()


class BroadcastReceiver:
    """A replica's side: receives into reused memory; tensors are valid until the next `receive`."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._buffers: list[torch.Tensor] = []

    def receive(
        self, invitation: Invitation, manifest: Manifest, *, build_timeout_s: float, receive_timeout_s: float
    ) -> Mapping[str, torch.Tensor]:
        """The verified version. `PeerLost` or `Aborted` if the group fails: the served weights are unchanged."""
        check_manifest(manifest)
        try:
            store = StoreClient(invitation.host, invitation.port, self._token, build_timeout_s)
        except OSError as error:
            raise Aborted(f"group {invitation.name} could not be built: {error}") from error
        group = Group(invitation, build_timeout_s, store)
        deadline = time.monotonic() + receive_timeout_s
        sizes = [bucket.size_bytes - len(layout(bucket.tensors).header) for bucket in manifest.buckets]
        if [buffer.numel() for buffer in self._buffers] != sizes:
            self._buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        tensors: dict[str, torch.Tensor] = {}
        digests: list[bytes] = []
        try:
            for bucket, buffer in zip(manifest.buckets, self._buffers, strict=True):
                if buffer.numel():
                    group.broadcast(buffer, _left_s(deadline, manifest))
                placed = layout(bucket.tensors)
                for span in placed.spans:
                    tensor = tensor_at(buffer, span.start - len(placed.header), span.tensor)
                    tensors[span.tensor.name] = tensor
                    digests.append(tensor_digest(span.tensor.name, tensor))
            check_digests(manifest, digests)
        finally:
            group.close()
        return tensors


def _listening_on(host: str) -> dist.ProcessGroupGloo.Device:
    """Peers connect to the address by which the store is reached; the default of gloo is that of the host name."""
    if ipaddress.ip_address(host).is_unspecified:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname=host)


def _left_s(deadline: float, manifest: Manifest) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise Aborted(f"the broadcast of {describe(manifest)} did not end before its deadline")
    return left_s
