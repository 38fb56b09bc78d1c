"""Atomic checkpoints: complete or absent.

    <directory>/step-00000120/
        model.safetensors       the policy; with config.json and the tokenizer the directory can be loaded as a model
        .metadata, *.distcp     the learner, as torch.distributed.checkpoint (DCP) writes it
        checkpoint.json         step, sizes and digests of the files above

A checkpoint is written under another name, flushed to disk and renamed. If a step is saved again, its former checkpoint
has another name until then, and counts if the new one does not follow. A damaged one is skipped with a warning, and the
previous one is used.

The ranks of a trainer write it together, each its own part, and any number of ranks can resume from it. DCP's
`.metadata` is pickled. It is read only after the digests of all files were verified, by an unpickler that admits DCP's
own classes, and is never sent over a network.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from penstock.errors import ConfigError, RunFailed
from penstock.runtime.disk import flush
from penstock.train.settings import CheckpointSection
from penstock.train.sharding import ShardedPolicy, load_rows
from penstock.train.step import Learner
from penstock.train.world import ALONE, World
from penstock.weights.io.digest import specs_of
from penstock.weights.io.parts import lay_out, write_parts
from penstock.wire.codec import DAMAGED

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MODEL_FILE = "model.safetensors"
RECORD_FILE = "checkpoint.json"
_PREFIX = "step-"
_PARTIAL_PREFIX = ".partial-"
_REPLACED_PREFIX = ".replaced-"
_LEARNER_FILES = (".metadata", ".distcp")
_MASTER = "master/"


class FileRecord(msgspec.Struct, frozen=True):
    """Expected size and digest of a file."""

    size_bytes: int
    digest: str
    """xxh3-128 of the whole file, in hexadecimal."""


class CheckpointRecord(msgspec.Struct, frozen=True):
    """The content of `checkpoint.json`."""

    step: int
    """Optimiser steps done, which is also the version of the weights."""
    files: dict[str, FileRecord]
    format_version: int = FORMAT_VERSION


class Checkpoint(msgspec.Struct, frozen=True):
    """A complete checkpoint."""

    directory: Path
    record: CheckpointRecord

    @property
    def step(self) -> int:
        return self.record.step


def save(
    directory: Path, learner: Learner, *, keep: int = CheckpointSection().keep, world: World = ALONE
) -> Checkpoint:
    """Writes the learner and its policy, then removes all but the newest `keep` checkpoints up to this one.

    Newer ones are damaged: the learner would have resumed from them.

    With several ranks, rank 0 calls this while each of the others calls `save_part`. Raises RunFailed if a write fails
    (for example on a full disk); earlier checkpoints are untouched then.
    """
    final = directory / f"{_PREFIX}{learner.steps:08d}"
    replaced = directory / f"{_REPLACED_PREFIX}{final.name}"
    partial = _partial(directory, learner)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for abandoned in directory.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(abandoned)
        _restore(directory)
        partial.mkdir()
        learner.policy.save_config(partial)
        lay_out(partial / MODEL_FILE, specs_of(learner.policy.named_tensors()), marked=True)
        _write(partial, learner, world)
        files = {path.name: _describe(path) for path in sorted(partial.iterdir())}
        record = CheckpointRecord(step=learner.steps, files=files)
        (partial / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        for path in [*partial.iterdir(), partial]:
            flush(path)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        flush(directory)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            _restore(directory)
        raise RunFailed(
            f"cannot write the checkpoint of step {learner.steps} to {directory}: {_cause(error)}. Earlier checkpoints "
            "are untouched; free some space and resume"
        ) from error
    candidates = _candidates(directory)
    kept = candidates[candidates.index(final) :][:keep]
    for other in (replaced, *candidates):
        if other not in kept:
            shutil.rmtree(other, ignore_errors=True)
    return Checkpoint(final, record)


def save_part(directory: Path, learner: Learner, world: World) -> None:
    """Writes the part of this rank, other than rank 0, of the learner and its policy."""
    try:
        _write(_partial(directory, learner), learner, world)
    except (OSError, CheckpointException) as error:
        raise RunFailed(f"cannot write a part of the checkpoint of step {learner.steps}: {_cause(error)}") from error


def _write(partial: Path, learner: Learner, world: World) -> None:
    """This rank's part of the files. When it returns on rank 0, all ranks have written theirs."""
    world.barrier()  # rank 0 has made the directory and the model's file
    tensors = learner.policy.named_tensors()
    write_parts(partial / MODEL_FILE, specs_of(tensors), tensors, rank=world.rank, marked=True)
    writer = FileSystemWriter(partial, sync_files=False)
    with _without_warnings():
        state_dict_saver.save(_state(learner), storage_writer=writer, process_group=world.group, no_dist=world.alone)


def _state(learner: Learner) -> dict[str, Tensor]:
    """All but the model's file. The master weights of a sharded policy are its shards unless it computes in float32."""
    state = learner.state()
    if isinstance(learner.policy, ShardedPolicy) and learner.policy.dtype != torch.float32:
        trained = ((name, p) for name, p in learner.policy.module.named_parameters() if p.requires_grad)
        state |= {f"{_MASTER}{name}": parameter.detach() for name, parameter in trained}
    return state


def latest(directory: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None. Damaged ones are logged and skipped."""
    for candidate in _candidates(directory):
        try:
            return verify(candidate)
        except ConfigError as error:
            logger.warning("%s; falling back to the checkpoint before it", error)
    return None


def last_resort(directory: Path, *, keep: int) -> int:
    """The step to start from if all newer checkpoints are damaged: 0 until `keep` of them have been written."""
    candidates = _candidates(directory)
    return int(candidates[-1].name.removeprefix(_PREFIX)) if len(candidates) >= keep else 0


def verify(candidate: Path) -> Checkpoint:
    """Reads all files and compares them with the record. Raises ConfigError with the difference."""
    try:
        record = msgspec.json.decode((candidate / RECORD_FILE).read_bytes(), type=CheckpointRecord)
        if record.format_version != FORMAT_VERSION:
            raise ConfigError(
                f"checkpoint {candidate} has format version {record.format_version}; "
                f"this release reads version {FORMAT_VERSION}"
            )
        for name, expected in record.files.items():
            if Path(name).name != name:
                raise ConfigError(f"checkpoint {candidate} lists a file outside itself: {name!r}")
            found = _describe(candidate / name)
            if found != expected:
                raise ConfigError(
                    f"checkpoint {candidate} is damaged: {name} should have {expected.size_bytes} bytes and digest "
                    f"{expected.digest}, found {found.size_bytes} and {found.digest}"
                )
    except (OSError, *DAMAGED) as error:
        raise ConfigError(f"checkpoint {candidate} is damaged: {error}") from error
    return Checkpoint(candidate, record)


def read(directory: Path) -> Checkpoint:
    """A checkpoint whose files another rank of this trainer has verified."""
    return Checkpoint(directory, msgspec.json.decode((directory / RECORD_FILE).read_bytes(), type=CheckpointRecord))


def load(checkpoint: Checkpoint, learner: Learner) -> None:
    """Restores the learner and its policy exactly, on any number of ranks. Every rank calls it."""
    path = checkpoint.directory / MODEL_FILE
    try:
        if isinstance(learner.policy, ShardedPolicy):
            with safetensors.safe_open(path, "pt") as file:
                learner.policy.check_shapes({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
                load_rows(learner.policy.named_shards().items(), lambda name, a, b: file.get_slice(name)[a:b])
        else:
            learner.policy.load_tensors(safetensors.torch.load_file(path))
        state = _read_state(checkpoint.directory, learner)
    except (OSError, safetensors.SafetensorError, CheckpointException) as error:
        raise ConfigError(f"cannot read {checkpoint.directory}: {_cause(error)}") from error
    if isinstance(learner.policy, ShardedPolicy):
        masters = {name: tensor for name, tensor in state.items() if name.startswith(_MASTER)}
        state = {name: tensor for name, tensor in state.items() if name not in masters}
        with torch.no_grad():
            for name, parameter in learner.policy.module.named_parameters():
                if f"{_MASTER}{name}" in masters:
                    parameter.copy_(masters[f"{_MASTER}{name}"])
    learner.load_state(state)


class _Unpickler(pickle.Unpickler):
    """Admits the classes of which DCP's metadata consists, and no other name: a pickle can call whatever it names."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint contains")


_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}


class _Reader(FileSystemReader):
    """Reads DCP's files of one directory, without the classes and the paths that its metadata may not contain."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
                outside = [
                    stored.relative_path
                    for stored in metadata.storage_data.values()
                    if Path(stored.relative_path).name != stored.relative_path
                ]
            except OSError:
                raise
            except Exception as error:  # whatever a damaged pickle raises
                raise ConfigError(f"checkpoint {self.path} is damaged: {error}") from error
        if outside:
            raise ConfigError(f"checkpoint {self.path} is damaged: its metadata names the file {outside[0]!r}")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _read_state(directory: Path, learner: Learner) -> dict[str, Tensor]:
    """The saved state of the learner: of each tensor, the rows that this rank holds of its parameter."""
    reader = _Reader(directory)
    parameters = dict(learner.policy.module.named_parameters())
    state: dict[str, Tensor] = {}
    for entry, saved in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            raise ConfigError(f"checkpoint {directory} holds {entry!r}, which is no tensor")
        parameter = parameters.get(entry.partition("/")[2])
        if isinstance(parameter, DTensor) and parameter.shape == saved.size:
            state[entry] = torch.empty_like(parameter.detach(), dtype=saved.properties.dtype, device="cpu")
        else:
            state[entry] = torch.empty(saved.size, dtype=saved.properties.dtype)
    with _without_warnings():  # each rank reads independently
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    return state


def export(directory: Path, target: Path) -> None:
    """Copies the model of a checkpoint, without the learner, to a directory that can be loaded as a model. Raises
    ConfigError if the checkpoint is damaged."""
    record = verify(directory).record
    target.mkdir(parents=True, exist_ok=True)
    for name in record.files:
        if not name.endswith(_LEARNER_FILES):
            shutil.copyfile(directory / name, target / name)


def _candidates(directory: Path) -> list[Path]:
    """Newest first, without partial ones, and with a replaced one only if its replacement is absent."""
    found = {path.name.removeprefix(_REPLACED_PREFIX): path for path in directory.glob(f"{_REPLACED_PREFIX}{_PREFIX}*")}
    found |= {path.name: path for path in directory.glob(f"{_PREFIX}*")}
    return [found[name] for name in sorted(found, reverse=True)]


def _restore(directory: Path) -> None:
    """Gives replaced checkpoints their name back if they have no replacement, and removes the others."""
    for replaced in directory.glob(f"{_REPLACED_PREFIX}{_PREFIX}*"):
        final = directory / replaced.name.removeprefix(_REPLACED_PREFIX)
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)


def _partial(directory: Path, learner: Learner) -> Path:
    return directory / f"{_PARTIAL_PREFIX}{learner.steps:08d}"


def _cause(error: BaseException) -> str:
    """The error of one rank, from the report of all ranks."""
    if isinstance(error, CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    if "inline_container" in str(error):  # torch's writer checks its position, not what the write returned
        return "a file was cut short, which means that there is no space left on the device"
    return str(error)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses warnings that a process saves or loads without a group, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _describe(path: Path) -> FileRecord:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())
