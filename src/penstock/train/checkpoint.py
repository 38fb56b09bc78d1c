"""Checkpoints that are whole or absent.

    <directory>/step-00000120/
        model.safetensors       the policy; with config.json and the tokenizer beside it the directory opens as a model
        optimizer.safetensors   the learner
        checkpoint.json         step, sizes and digests of the files above

A checkpoint is written under another name, flushed to disk and renamed. One that is damaged all the same is passed over
with a warning in favour of the one before it. Nothing here is ever unpickled.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
import xxhash
from torch import Tensor

from penstock.errors import ConfigError, RunFailed
from penstock.runtime.disk import flush
from penstock.train.step import Learner
from penstock.wire.codec import DAMAGED

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "checkpoint.json"
_PREFIX = "step-"
_PARTIAL_PREFIX = ".partial-"


class FileRecord(msgspec.Struct, frozen=True):
    """What a file of a checkpoint must be."""

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
    """A checkpoint that was found whole."""

    directory: Path
    record: CheckpointRecord

    @property
    def step(self) -> int:
        return self.record.step


def save(directory: Path, learner: Learner, *, keep: int = 2) -> Checkpoint:
    """Write the learner and its policy, then remove all but the newest `keep` checkpoints.

    RunFailed if the disk refuses (full, say); checkpoints written before are untouched then.
    """
    final = directory / f"{_PREFIX}{learner.steps:08d}"
    partial = directory / f"{_PARTIAL_PREFIX}{learner.steps:08d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for abandoned in directory.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(abandoned)
        partial.mkdir()
        learner.policy.save_config(partial)
        _write_tensors(partial / MODEL_FILE, learner.policy.named_tensors())
        _write_tensors(partial / OPTIMIZER_FILE, learner.state())
        files = {path.name: _describe(path) for path in sorted(partial.iterdir())}
        record = CheckpointRecord(step=learner.steps, files=files)
        (partial / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        for path in [*partial.iterdir(), partial]:
            flush(path)
        if final.exists():
            final.rename(directory / f"{_PARTIAL_PREFIX}replaced")
        partial.rename(final)
        flush(directory)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunFailed(
            f"cannot write the checkpoint of step {learner.steps} to {directory}: {error}. Earlier checkpoints are "
            "untouched; free some space and resume"
        ) from error
    for old in _candidates(directory)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return Checkpoint(final, record)


def latest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None. Damaged ones are named in a warning and passed over."""
    for candidate in _candidates(directory):
        try:
            return verify(candidate)
        except ConfigError as error:
            logger.warning("%s; falling back to the checkpoint before it", error)
    return None


def last_resort(directory: Path, *, keep: int) -> int:
    """The step to start from if all newer checkpoints turn out damaged: 0 until `keep` of them have been written."""
    candidates = _candidates(directory)
    return int(candidates[-1].name.removeprefix(_PREFIX)) if len(candidates) >= keep else 0


def verify(candidate: Path) -> Checkpoint:
    """Read everything and compare with the record. ConfigError says what is wrong."""
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


def load(checkpoint: Checkpoint, learner: Learner) -> None:
    """Put the learner and its policy back exactly where they were saved."""
    learner.policy.load_tensors(_read_tensors(checkpoint.directory / MODEL_FILE))
    learner.load_state(_read_tensors(checkpoint.directory / OPTIMIZER_FILE))


def _candidates(directory: Path) -> list[Path]:
    """Newest first; half-written ones never count."""
    return sorted(directory.glob(f"{_PREFIX}*"), reverse=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, path, metadata={"format": "pt"})


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _describe(path: Path) -> FileRecord:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())
