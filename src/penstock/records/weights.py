"""Which weights exist, and where."""

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
    """Which weights an engine holds. The digest alone does not name a version: a step that changes nothing publishes
    the old bytes under a new version."""

    version: Version = Version(-1)
    digest: str = ""
    """Empty when nothing complete is held."""


NOTHING_HELD = Held()


class Manifest(msgspec.Struct, frozen=True):
    """An immutable version of a model's weights. Two versions have the same bytes if their digests are equal."""

    version: Version
    lineage: str
    """Identifies the trainer incarnation: after a trainer restart the same version may be other weights."""
    digest: str
    """Over names, dtypes, shapes and all bytes in order: what an engine recomputes to prove delivery."""
    buckets: tuple[BucketSpec, ...]
    directory: str
    """Relative to the run directory; readers refuse anything that leads outside it."""
    host_id: str = ""
    """The machine whose files these are: equal means they can be mapped directly. Empty: any machine of the run."""
    addresses: tuple[str, ...] = ()
    """Where the bytes can be pulled from elsewhere, each `host:port`."""
    ucxx_addresses: tuple[str, ...] = ()
    """The same by UCX."""
    meeting: str = ""
    """Where replicas that want it broadcast meet the trainer, `host:port`."""

    @property
    def held(self) -> Held:
        """What an engine holds that has loaded it."""
        return Held(self.version, self.digest)
