"""Versions of the weights and their locations."""

from __future__ import annotations

import msgspec

from penstock.records.ids import Version


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of an artifact."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BucketSpec(msgspec.Struct, frozen=True):
    """One file of an artifact: consecutive tensors, hashed together."""

    file: str
    size_bytes: int
    digest: str
    tensors: tuple[TensorSpec, ...]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """The weights that an engine holds. The digest alone does not identify a version: a step that changes nothing
    publishes the old bytes under a new version."""

    version: Version = Version(-1)
    digest: str = ""
    """Empty if the engine holds no complete version."""


NOTHING_HELD = Held()


class Manifest(msgspec.Struct, frozen=True):
    """An immutable version of a model's weights. Two versions have the same bytes if their digests are equal."""

    version: Version
    lineage: str
    """Identifies the trainer incarnation: after a trainer restart the same version may have other weights."""
    digest: str
    """Over names, dtypes, shapes and all bytes in order. An engine recomputes it to verify delivery."""
    buckets: tuple[BucketSpec, ...]
    directory: str
    """Relative to the run directory; readers refuse paths outside it."""
    host_id: str = ""
    """The machine that stores the files; a reader there can map them directly. Empty: any machine of the run."""
    addresses: tuple[str, ...] = ()
    """Where other machines can pull the bytes, each `host:port`."""
    ucxx_addresses: tuple[str, ...] = ()
    """The same over UCX."""
    meeting: str = ""
    """Rendezvous address of the broadcast from the trainer to the replicas, `host:port`."""

    @property
    def held(self) -> Held:
        """The `Held` of an engine that has loaded this version."""
        return Held(self.version, self.digest)
