"""Checks of manifests: they come from the network or from a file, and are not trusted before."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import PurePosixPath

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.records.ids import Version
from penstock.records.weights import Manifest, TensorSpec
from penstock.weights.buckets import layout, size_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def directory_name(pipeline: str, lineage: str, version: Version) -> str:
    """The artifact's directory, relative to the run directory."""
    for what, text in (("pipeline", pipeline), ("lineage", lineage)):
        if not _NAME.fullmatch(text):
            raise LocalProtocolError(f"{what} {text!r} cannot name a directory: use letters, digits, '.', '_' and '-'")
    return f"weights/{pipeline}/{lineage}/{version:08d}"


def bucket_file(index: int) -> str:
    return f"bucket-{index:05d}.safetensors"


def check_manifest(manifest: Manifest) -> None:
    """Raises `RemoteProtocolError` unless the manifest is consistent and names no path outside the run directory."""

    def refuse(why: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"manifest of version {manifest.version} (lineage {manifest.lineage!r}) is refused: {why}"
        )

    if manifest.version < 0:
        raise refuse("a version is never negative")
    if not _DIGEST.fullmatch(manifest.digest):
        raise refuse(f"its digest {manifest.digest!r} is not 32 hexadecimal digits")
    path = PurePosixPath(manifest.directory)
    if not manifest.directory or path.is_absolute() or ".." in path.parts or "\0" in manifest.directory:
        raise refuse(f"its directory {manifest.directory!r} is not inside the run directory")
    names: list[str] = []
    files: set[str] = set()
    for bucket in manifest.buckets:
        if not _NAME.fullmatch(bucket.file) or bucket.file in files:
            raise refuse(f"bucket file {bucket.file!r} is not a plain, unique file name")
        if not _DIGEST.fullmatch(bucket.digest):
            raise refuse(f"the digest of {bucket.file} is not 32 hexadecimal digits")
        files.add(bucket.file)
        names.extend(tensor.name for tensor in bucket.tensors)
        try:
            if any(extent < 0 for tensor in bucket.tensors for extent in tensor.shape):
                raise refuse(f"{bucket.file} holds a tensor with a negative extent")
            expected = layout(bucket.tensors).size_bytes
        except LocalProtocolError as error:
            raise refuse(str(error)) from error
        if expected != bucket.size_bytes:
            raise refuse(f"{bucket.file} should have {expected} bytes for its tensors, but states {bucket.size_bytes}")
    if any(left >= right for left, right in pairwise(names)):
        raise refuse("its tensors are not in the order of their names, or a name occurs twice")


def tensors_of(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """All tensors of the version, in the order of their names."""
    return tuple(tensor for bucket in manifest.buckets for tensor in bucket.tensors)


def parameter_bytes(manifest: Manifest) -> int:
    """Bytes of all tensors, headers not counted."""
    return sum(size_of(tensor) for tensor in tensors_of(manifest))


def describe(manifest: Manifest) -> str:
    """For logs and errors."""
    size_mb = parameter_bytes(manifest) / 1e6
    return f"version {manifest.version} ({manifest.digest[:8]}, {size_mb:.1f} MB in {len(manifest.buckets)} buckets)"
