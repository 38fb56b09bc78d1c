"""Interfaces that the updater uses: the engine, the source of manifests, and the transport that fetches versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from penstock.records.weights import Held, Manifest


class Engine(Protocol):
    """The interface of an engine for updates. All calls block and are made from a background thread."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors by name, not copies."""
        ...

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies a complete version beside the live one, without disturbing generation."""
        ...

    def staged_tensors(self) -> Mapping[str, torch.Tensor]:
        """The memory that `swap` will serve."""
        ...

    def swap(self, version: int, digest: str, timeout_s: float) -> float:
        """Serves the staged version from the next decode step on; returns the pause in seconds."""
        ...

    def load_in_place(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str, timeout_s: float) -> float:
        """Overwrites the live tensors; returns the pause in seconds."""
        ...

    def relabel(self, version: int, timeout_s: float) -> None:
        """Labels the held weights as this version, and all tokens sampled from then on. Generation continues."""
        ...

    def sleep(self, timeout_s: float) -> None:
        """Stops generation between two decode steps until `wake`."""
        ...

    def wake(self, timeout_s: float) -> None:
        """Resumes generation; no effect if it runs."""
        ...


class ManifestSource(Protocol):
    """The source of the newest manifest."""

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        """The newest version unless it is the one held; None when `wait_s` passed without one."""
        ...


class WeightTransport(Protocol):
    """Fetches a version's bytes into this host's memory."""

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        """The version's tensors; `verify=False` leaves the digests to the caller. Blocks.

        `Stale` if the version was removed, `Transient` if a retry may succeed, `RemoteProtocolError` if its bytes
        differ from those published.
        """
        ...


@runtime_checkable
class SelfVerifying(Protocol):
    """A transport that can verify delivery in device memory, faster than by the manifest's hash."""

    def delivered(self, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> str:
        """The manifest's digest if and only if these tensors are that version. `Stale` if it was replaced."""
        ...
