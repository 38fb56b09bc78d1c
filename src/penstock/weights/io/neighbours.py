"""What an updater asks of its neighbours: the engine it updates, who tells it of versions, and what fetches them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from penstock.records.weights import Held, Manifest


class Engine(Protocol):
    """What an engine must offer to be updated. All calls block and come from a background thread."""

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
        """Serves what was staged from the next decode step on; returns the pause in seconds."""
        ...

    def load_in_place(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str, timeout_s: float) -> float:
        """Overwrites the live tensors; returns the pause in seconds."""
        ...

    def relabel(self, version: int, timeout_s: float) -> None:
        """The weights it holds are also this version: tokens drawn from now on are of it. Generation goes on."""
        ...

    def sleep(self, timeout_s: float) -> None:
        """Stops generation between two decode steps until `wake`."""
        ...

    def wake(self, timeout_s: float) -> None:
        """Lets generation go on; harmless when it does."""
        ...


class ManifestSource(Protocol):
    """Where the newest version is learned."""

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        """The newest version unless it is the one held; None when `wait_s` passed without one."""
        ...


class WeightTransport(Protocol):
    """Fetches a version's bytes into this host's memory."""

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        """The version's tensors; `verify=False` leaves the digests to the caller. Blocks.

        `Stale` when the version is gone, `Transient` when it may be had later, `RemoteProtocolError` when its bytes
        are not what was published.
        """
        ...


@runtime_checkable
class SelfVerifying(Protocol):
    """A transport that can verify delivery where the memory lies, faster than by the manifest's own hash."""

    def delivered(self, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> str:
        """The manifest's digest if and only if these tensors are that version. `Stale` when it made way meanwhile."""
        ...
