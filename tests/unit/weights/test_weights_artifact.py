"""Artifacts on disk: what is published is what is loaded, or an error says why not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from penstock.errors import LocalProtocolError, RemoteProtocolError, RunFailed, Stale
from penstock.records.ids import Version
from penstock.records.weights import Manifest, TensorSpec
from penstock.runtime.tensors import module_tensors
from penstock.weights.buckets import layout, plan, size_of
from penstock.weights.io.digest import digest_of
from penstock.weights.io.fetch import fetch
from penstock.weights.io.files import MANIFEST_FILE, FileSource, Publisher, map_version
from penstock.weights.manifest import check_manifest, parameter_bytes


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(11, 4, generator=generator),
        "b.half": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "a.odd": torch.randint(0, 2, (3,), generator=generator, dtype=torch.uint8),
        "count": torch.tensor(7 + seed, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "strided": torch.randn(4, 6, generator=generator).t(),
    }


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def publish(run_dir: Path, seed: int = 0, **options: object) -> Manifest:
    return Publisher(run_dir, "l1", bucket_bytes=64, **options).publish(Version(seed), model(seed))  # type: ignore[arg-type]


def load(run_dir: Path, manifest: Manifest, threads: int = 1) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in model().items()}
    with FileSource(run_dir, manifest) as source:
        fetch(source, manifest, tensors, threads=threads)
    return tensors


def test_what_is_published_is_loaded(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    check_manifest(manifest)
    assert len(manifest.buckets) > 2
    assert_same(load(tmp_path, manifest), model())
    assert_same(load(tmp_path, manifest, threads=3), model())
    assert_same(map_version(tmp_path, manifest), model())
    assert digest_of(model()) == manifest.digest
    assert parameter_bytes(manifest) == sum(t.nbytes for t in model().values())


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    read: dict[str, torch.Tensor] = {}
    for bucket in manifest.buckets:
        read |= safetensors.torch.load_file(tmp_path / manifest.directory / bucket.file)
    assert_same(read, model())


@pytest.mark.parametrize("change", ["value", "name", "dtype", "shape"])
def test_digest_covers_names_dtypes_shapes_and_bytes(change: str) -> None:
    other = model()
    match change:
        case "value":
            other["embed"][3, 2] += 1e-6
        case "name":
            other["embedding"] = other.pop("embed")
        case "dtype":
            other["embed"] = other["embed"].view(torch.int32)
        case "shape":
            other["embed"] = other["embed"].reshape(4, 11)
    assert digest_of(other) != digest_of(model())


def test_digest_depends_neither_on_cutting_nor_on_the_order_of_the_mapping(tmp_path: Path) -> None:
    small = Publisher(tmp_path, "small", bucket_bytes=32).publish(Version(0), model())
    large = Publisher(tmp_path, "large").publish(Version(0), dict(reversed(model().items())))
    assert small.digest == large.digest
    assert len(small.buckets) > len(large.buckets) == 1


@pytest.mark.parametrize("read", [load, map_version])
def test_every_single_damaged_byte_is_noticed(tmp_path: Path, read: object) -> None:
    manifest = publish(tmp_path)
    for bucket in manifest.buckets:
        path = tmp_path / manifest.directory / bucket.file
        good = path.read_bytes()
        for position in (0, 9, len(good) - 1):
            if position >= len(layout(bucket.tensors).header) or position < 10:
                bad = bytearray(good)
                bad[position] ^= 1
                path.write_bytes(bad)
                with pytest.raises(RemoteProtocolError, match=bucket.file):
                    read(tmp_path, manifest)  # type: ignore[operator]
        path.write_bytes(good[:-1])
        with pytest.raises(RemoteProtocolError, match="bytes"):
            read(tmp_path, manifest)  # type: ignore[operator]
        path.write_bytes(good)
    read(tmp_path, manifest)  # type: ignore[operator]


def test_a_manifest_that_lies_about_its_digest_is_noticed(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(publish(tmp_path), digest="0" * 32)
    for read in (load, map_version):
        with pytest.raises(RemoteProtocolError, match="published again"):
            read(tmp_path, manifest)


@pytest.mark.parametrize("directory", ["/etc", "../other", "weights/../../x", "", "a\0b"])
def test_paths_that_lead_out_are_refused(tmp_path: Path, directory: str) -> None:
    manifest = msgspec.structs.replace(publish(tmp_path / "run"), directory=directory)
    with pytest.raises(RemoteProtocolError, match="inside the run directory"):
        load(tmp_path / "run", manifest)


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    outside = publish(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").symlink_to(tmp_path / "elsewhere" / "weights")
    with pytest.raises(RemoteProtocolError, match="outside the run directory"):
        load(tmp_path / "run", outside)
    inside = publish(tmp_path / "third")
    path = tmp_path / "third" / inside.directory / inside.buckets[0].file
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(RemoteProtocolError, match="cannot be opened"):
        load(tmp_path / "third", inside)


def test_file_names_from_the_wire_are_plain(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    bucket = msgspec.structs.replace(manifest.buckets[0], file="../bucket")
    with pytest.raises(RemoteProtocolError, match="plain"):
        load(tmp_path, msgspec.structs.replace(manifest, buckets=(bucket, *manifest.buckets[1:])))


def test_a_manifest_whose_sizes_disagree_is_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path)
    huge = msgspec.structs.replace(manifest.buckets[0], size_bytes=1 << 60)
    with pytest.raises(RemoteProtocolError, match="states"):
        check_manifest(msgspec.structs.replace(manifest, buckets=(huge, *manifest.buckets[1:])))


def test_old_versions_are_removed_and_read_as_stale(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, "l1", keep=2)
    manifests = [publisher.publish(Version(v), model(v)) for v in range(4)]
    for manifest in manifests[:2]:
        with pytest.raises(Stale, match="newest"):
            load(tmp_path, manifest)
    for manifest in manifests[2:]:
        assert_same(load(tmp_path, manifest), model(manifest.version))


def test_a_reader_that_opened_a_version_is_not_disturbed_by_its_removal(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, "l1", keep=1)
    first = publisher.publish(Version(0), model(0))
    mapped = map_version(tmp_path, first)
    with FileSource(tmp_path, first) as source:
        publisher.publish(Version(1), model(1))
        assert not (tmp_path / first.directory).exists()
        target = bytearray(first.buckets[0].size_bytes)
        assert sum(len(piece) for piece in source.pieces(0, 0, memoryview(target))) == len(target)
    assert target.startswith(layout(first.buckets[0].tensors).header)
    assert_same(mapped, model(0))


def test_durable_versions_are_kept(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, "l1", keep=1, keep_durable=1)
    durable = publisher.publish(Version(0), model(0), durable=True)
    later = publisher.publish(Version(1), model(1))
    publisher.make_durable(Version(1))
    with pytest.raises(Stale):
        load(tmp_path, durable)
    for v in range(2, 5):
        publisher.publish(Version(v), model(v))
    assert_same(load(tmp_path, later), model(1))
    with pytest.raises(Stale, match="before it could be made durable"):
        publisher.make_durable(Version(2))


def test_a_new_incarnation_clears_up_after_the_old_one(tmp_path: Path) -> None:
    old = Publisher(tmp_path, "l1", keep=3)
    kept = old.publish(Version(5), model(5), durable=True)
    gone = old.publish(Version(6), model(6))
    leftover = (tmp_path / gone.directory).parent / ".writing-00000007-1"
    leftover.mkdir()
    new = Publisher(tmp_path, "l2", keep=3)
    assert not leftover.exists()
    assert_same(load(tmp_path, gone), model(6))  # until the new incarnation has something newer
    new.publish(Version(5), model(50))
    with pytest.raises(Stale):
        load(tmp_path, gone)
    assert_same(load(tmp_path, kept), model(5))


def test_publishing_twice_is_harmless_and_changing_a_version_is_refused(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, "l1")
    first = publisher.publish(Version(3), model(3))
    for damaged, content in (
        (first.buckets[0].file, b"damaged"),
        (MANIFEST_FILE, b"{"),
        (MANIFEST_FILE, b'{"\xff": 1}'),
    ):
        (tmp_path / first.directory / damaged).write_bytes(content)
        assert publisher.publish(Version(3), model(3)) == first
        assert_same(load(tmp_path, first), model(3))
    (tmp_path / first.directory / MANIFEST_FILE).unlink()
    assert publisher.publish(Version(3), model(3)) == first
    with pytest.raises(LocalProtocolError, match="other weights"):
        publisher.publish(Version(3), model(4))
    assert_same(load(tmp_path, first), model(3))
    assert [path.name for path in (tmp_path / first.directory).parent.iterdir()] == ["00000003"]


def test_a_failed_publication_leaves_nothing_behind(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, "l1")
    with pytest.raises(LocalProtocolError, match="complex64"):
        publisher.publish(Version(0), {"ok": torch.zeros(3), "bad": torch.zeros(3, dtype=torch.complex64)})
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    publisher = Publisher(tmp_path, "l1")
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(RunFailed, match=f"version 7 .* to {tmp_path}/weights/main/l1: {os.strerror(code)}"):
        publisher.publish(Version(7), model(7))
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]


def test_plan_keeps_order_and_bounds() -> None:
    tensors = [TensorSpec(f"t{i}", "float32", (i,)) for i in range(10)]
    buckets = plan(reversed(tensors), 40)
    assert [t for bucket in buckets for t in bucket] == tensors
    assert all(sum(map(size_of, bucket)) <= 40 or len(bucket) == 1 for bucket in buckets)
    with pytest.raises(LocalProtocolError, match="bucket_bytes"):
        plan(tensors, 0)


def test_a_module_is_published_once_per_tied_tensor() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    assert sorted(module_tensors(Tied())) == ["embed.weight", "scale"]
