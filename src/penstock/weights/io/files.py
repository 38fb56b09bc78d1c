"""Versions as directories of safetensors files: written under another name, renamed, read by all processes of the host.

Promises:

- a version's directory is complete or absent: it is written under another name and renamed;
- a published version never changes;
- a version is removed only when `keep` newer ones of its lineage exist, or its lineage has ended and a newer one has
  published. A reader that has opened it can finish: it holds the files, not their names. A later reader gets
  `Stale` and requests the newest version instead;
- durable versions are flushed to the disk before they are marked durable, and the newest `keep_durable` are kept.

Ordinary versions are not flushed: they are read through the page cache, which is the shared memory of the host, and
most are removed before they ever reach the disk. After a power failure such a version may be damaged; its digest
shows it, and training starts from a durable version anyway.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from penstock.errors import Damaged, LocalProtocolError, RemoteProtocolError, RunFailed, Stale, Transient, sentence_of
from penstock.records.ids import Version
from penstock.records.weights import BucketSpec, Manifest
from penstock.runtime.disk import flush
from penstock.weights.buckets import DEFAULT_BUCKET_BYTES, TensorHash, compose, layout, plan
from penstock.weights.io.digest import PIECE_BYTES, host_pieces, specs_of, tensor_digest
from penstock.weights.io.fetch import check_digests, tensor_at
from penstock.weights.io.parts import hash_file, is_sharded, lay_out, write_parts
from penstock.weights.manifest import bucket_file, check_manifest, describe, directory_name
from penstock.weights.settings import WeightsSection
from penstock.wire.codec import DAMAGED

MANIFEST_FILE = "manifest.json"
DURABLE_FILE = "durable"


class Publisher:
    """Writes a pipeline's versions into its run directory. One per trainer incarnation; not thread-safe."""

    def __init__(
        self,
        run_dir: Path,
        lineage: str,
        keep: int = WeightsSection().keep,
        *,
        pipeline: str = "main",
        keep_durable: int = 2,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        host_id: str = "",
        addresses: tuple[str, ...] = (),
        ucxx_addresses: tuple[str, ...] = (),
        meeting: str = "",
    ) -> None:
        """Every manifest states the sources of a version besides the run directory."""
        if keep < 1 or keep_durable < 1:
            raise LocalProtocolError(f"keep and keep_durable must be at least 1, found {keep} and {keep_durable}")
        self._run_dir = run_dir
        self._pipeline = pipeline
        self._lineage = lineage
        self._keep = keep
        self._keep_durable = keep_durable
        self._bucket_bytes = bucket_bytes
        self._places = {
            "host_id": host_id,
            "addresses": addresses,
            "ucxx_addresses": ucxx_addresses,
            "meeting": meeting,
        }
        self._root = (run_dir / directory_name(pipeline, lineage, Version(0))).parent.parent
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in self._root.glob("*/.writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def __repr__(self) -> str:
        return f"Publisher({self._root}, lineage={self._lineage!r}, keep={self._keep})"

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        durable: bool = False,
        others: Callable[[Path], None] = lambda directory: None,
    ) -> Manifest:
        """Writes one version and returns its manifest once readers can open it.

        The tensors must not change while this runs: pass a snapshot if training continues. Publishing the same version
        again rewrites its files, which repairs damaged ones; the bytes must be the same. Of sharded tensors this
        process writes its part; `others` makes the other ranks write theirs, by `write_version_parts`.
        """
        directory = directory_name(self._pipeline, self._lineage, version)
        final = self._run_dir / directory
        writing = final.parent / f".writing-{final.name}-{os.getpid()}"
        shutil.rmtree(writing, ignore_errors=True)
        try:
            writing.mkdir(parents=True)
            digests: list[bytes] = []
            buckets: list[BucketSpec] = []
            planned = plan(specs_of(tensors), self._bucket_bytes)
            sharded = is_sharded(tensors)
            if sharded:
                for index, specs in enumerate(planned):
                    lay_out(writing / bucket_file(index), specs)
                write_version_parts(writing, tensors, rank=0, bucket_bytes=self._bucket_bytes)
                others(writing)
            for index, specs in enumerate(planned):
                path = writing / bucket_file(index)
                if sharded:
                    found = hash_file(path, specs)
                else:
                    found = _write_bucket(path, {spec.name: tensors[spec.name] for spec in specs})
                size = layout(specs).size_bytes
                buckets.append(BucketSpec(bucket_file(index), size, compose(found), specs))
                digests.extend(found)
            manifest = Manifest(version, self._lineage, compose(digests), tuple(buckets), directory, **self._places)
            (writing / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
            if durable:
                _make_durable(writing)
            if final.exists():
                self._retire(final, manifest)
            os.rename(writing, final)
            if durable:
                flush(final.parent)
        except OSError as error:
            raise RunFailed(
                f"weights version {version} cannot be written to {final.parent}: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        self._collect()
        return manifest

    def _retire(self, final: Path, manifest: Manifest) -> None:
        """Removes the files of a version that was written again; raises if the weights are not the same."""
        try:
            before = read_manifest(final)
        except (Stale, RemoteProtocolError):
            before = None  # its manifest is damaged, so its content is unknown
        if before is not None and before.digest != manifest.digest:
            raise LocalProtocolError(
                f"{describe(before)} is already published by lineage {self._lineage!r} with other weights than "
                f"{describe(manifest)}; a restarted trainer must use a new lineage"
            )
        retired = final.parent / f".writing-{final.name}-retired"
        shutil.rmtree(retired, ignore_errors=True)
        os.rename(final, retired)
        shutil.rmtree(retired, ignore_errors=True)

    def make_durable(self, version: Version) -> None:
        """Flushes a published version to the disk and keeps it; `Stale` if it was removed already."""
        directory = self._run_dir / directory_name(self._pipeline, self._lineage, version)
        if not (directory / MANIFEST_FILE).exists():
            raise Stale(f"version {version} of lineage {self._lineage!r} was removed before it could be made durable")
        _make_durable(directory)
        flush(directory.parent)
        self._collect()

    def _collect(self) -> None:
        """Removes versions that `keep` and `keep_durable` do not cover."""
        own = sorted((self._root / self._lineage).glob("[0-9]*"), reverse=True)
        durable = sorted(self._root.glob(f"*/*/{DURABLE_FILE}"), key=lambda mark: mark.stat().st_mtime_ns, reverse=True)
        kept = {*own[: self._keep], *(mark.parent for mark in durable[: self._keep_durable])}
        if not own:  # this lineage has published nothing yet
            return
        for path in self._root.glob("*/[0-9]*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        for lineage in self._root.iterdir():
            if lineage.name != self._lineage and lineage.is_dir() and not any(lineage.iterdir()):
                lineage.rmdir()


def write_version_parts(
    directory: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> None:
    """Writes a rank's part of a version that rank 0 publishes."""
    for index, specs in enumerate(plan(specs_of(tensors), bucket_bytes)):
        write_parts(directory / bucket_file(index), specs, tensors, rank=rank)


def _write_bucket(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Writes the tensors, in order, and returns the digests of exactly the bytes written."""
    specs = specs_of(tensors)
    digests: list[bytes] = []
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(layout(specs).header))
        for spec in specs:
            hashed = TensorHash(spec)
            for piece in host_pieces(tensors[spec.name]):
                _write_all(file.fileno(), piece)
                hashed.update(piece)
            digests.append(hashed.digest())
    return digests


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _make_durable(directory: Path) -> None:
    """Flushes everything in the directory to the disk before the durable mark is written."""
    for path in directory.iterdir():
        flush(path)
    (directory / DURABLE_FILE).touch()
    flush(directory)


def read_manifest(directory: Path) -> Manifest:
    """The checked manifest of a version on disk."""
    try:
        body = (directory / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise Stale(f"{directory} holds no manifest: the version was removed") from error
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except DAMAGED as error:
        raise RemoteProtocolError(f"{directory / MANIFEST_FILE} is damaged: {error}") from error
    check_manifest(manifest)
    return manifest


class FileSource:
    """A version's files, all open from the start: removing the version does not affect this reader."""

    def __init__(self, run_dir: Path, manifest: Manifest) -> None:
        check_manifest(manifest)
        self._manifest = manifest
        self._descriptors: list[int] = []
        try:
            directory = _inside(run_dir, manifest)
            for bucket in manifest.buckets:
                self._descriptors.append(_open_bucket(directory, bucket))
        except FileNotFoundError as error:
            self.close()
            raise Stale(f"{describe(manifest)} was removed ({error.filename}); request the newest version") from error
        except BaseException:
            self.close()
            raise

    def pieces(self, bucket: int, offset: int, target: memoryview) -> Iterator[memoryview]:
        while target:
            read = os.preadv(self._descriptors[bucket], [target[:PIECE_BYTES]], offset)
            if read == 0:
                raise Transient(f"{self._manifest.buckets[bucket].file} ended at byte {offset} while it was read")
            yield target[:read]
            target, offset = target[read:], offset + read

    def fileno(self, bucket: int) -> int:
        return self._descriptors[bucket]

    def map(self, bucket: int) -> mmap.mmap:
        """The whole file, mapped copy-on-write."""
        return mmap.mmap(self._descriptors[bucket], 0, access=mmap.ACCESS_COPY)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inside(run_dir: Path, manifest: Manifest) -> Path:
    """The version's directory, links resolved; raises if it is outside the run directory."""
    root = run_dir.resolve()
    directory = (root / manifest.directory).resolve()
    if not directory.is_relative_to(root) or directory == root:
        raise RemoteProtocolError(
            f"{describe(manifest)} names directory {manifest.directory!r}, which leads outside the run directory {root}"
        )
    return directory


def _open_bucket(directory: Path, bucket: BucketSpec) -> int:
    """Opens one file and compares its size and header with the manifest."""
    path = directory / bucket.file
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RemoteProtocolError(f"weights file cannot be opened: {sentence_of(error)}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != bucket.size_bytes:
            raise Damaged(
                f"weights file {path} has {found.st_size} bytes, its manifest states {bucket.size_bytes}; "
                "it was damaged and must be published again"
            )
        header = layout(bucket.tensors).header
        if os.pread(descriptor, len(header), 0) != header:
            raise Damaged(f"weights file {path} does not hold the tensors that its manifest names")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_version(run_dir: Path, manifest: Manifest, *, verify: bool = True) -> dict[str, torch.Tensor]:
    """The version's tensors, mapped from the host's page cache; only misaligned ones are copied.

    Sizes and headers are always compared with the manifest, the digests unless `verify` is off. The
    mapping is private, so that no write can reach the file, and exists as long as the tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    with FileSource(run_dir, manifest) as source:
        for index, bucket in enumerate(manifest.buckets):
            mapped = torch.from_numpy(np.frombuffer(source.map(index), dtype=np.uint8))
            for span in layout(bucket.tensors).spans:
                tensors[span.tensor.name] = tensor_at(mapped, span.start, span.tensor)
    if verify:
        check_digests(manifest, [tensor_digest(name, tensor) for name, tensor in tensors.items()])
    return tensors


class FileTransport:
    """Fetches versions from a run directory on this host, or on a file system shared with the trainer."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def has_files(self, manifest: Manifest) -> bool:
        """Whether this host finds the version in the run directory."""
        check_manifest(manifest)
        return (_inside(self._run_dir, manifest) / MANIFEST_FILE).exists()

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Tensors are valid as long as they are referenced. `timeout_s` is unused: mapping a file needs no deadline."""
        return map_version(self._run_dir, manifest, verify=verify)
