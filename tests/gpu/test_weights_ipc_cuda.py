"""Weights from one process's device memory into another's, on one GPU: proved on the device, not on the host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from penstock.engines.serving import Serving
from penstock.errors import Stale
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.runtime.tensors import module_tensors
from penstock.weights.io.device import DEVICE_FILE, DeviceExport, DeviceTransport, views
from penstock.weights.io.device_digest import device_digest
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.manifest import tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(180),
]

DEADLINE_S = 120.0
ROW = torch.linspace(-1.0, 1.0, 256)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(256, 256) for _ in range(6)] + [nn.Linear(256, 3)]
    return nn.Sequential(*layers).requires_grad_(False).to(torch.bfloat16)


def output(module: nn.Module) -> bytes:
    with torch.inference_mode():
        row = ROW.to(torch.bfloat16).to(next(module.parameters()).device)
        return module(row).float().cpu().numpy().tobytes()


def train(run_dir: Path) -> None:
    """Publishes the versions it is told to, from its device, until it is killed."""
    publisher, export = Publisher(run_dir, "l1", keep=8), DeviceExport(run_dir)
    for line in sys.stdin:
        version = int(line)
        module = model(version).to("cuda")
        manifest = publisher.publish(Version(version), module_tensors(module))
        kept = export.offer(manifest, module_tensors(module))
        told = {"manifest": msgspec.to_builtins(manifest), "kept": kept, "made": output(module).hex()}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


class Recorded(FileTransport):
    """Files, and how often they were used."""

    used = 0

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> dict[str, torch.Tensor]:
        self.used += 1
        return super().fetch(manifest, timeout_s, verify=verify)


class Trainer:
    """The trainer process: this file, run as a script."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def publish(self, version: int) -> tuple[Manifest, bytes]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        told = json.loads(self.process.stdout.readline())
        assert told["kept"], "the trainer could not share its device memory"
        return msgspec.convert(told["manifest"], Manifest), bytes.fromhex(told["made"])

    def kill(self) -> int:
        self.process.kill()
        code = self.process.wait(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    if trainer.process.returncode is None:
        trainer.kill()


def update(engine: Serving, transport: DeviceTransport, manifest: Manifest) -> None:
    """As the updater does it."""
    tensors = transport.fetch(manifest, DEADLINE_S, verify=False)
    assert {tensor.device.type for tensor in tensors.values()} == {"cuda"}
    engine.stage(tensors)
    assert transport.delivered(manifest, engine.staged_tensors()) == manifest.digest
    engine.swap(manifest.version, manifest.digest)


def test_versions_go_from_device_to_device_and_serve_as_published(tmp_path: Path, trainer: Trainer) -> None:
    files = Recorded(tmp_path)
    transport = DeviceTransport(tmp_path, torch.device("cuda"), files)
    engine = Serving(model(99).to("cuda"))
    for version in (1, 2, 3):
        manifest, made = trainer.publish(version)
        update(engine, transport, manifest)
        assert output(engine.module) == made
        assert digest_of(engine.served_tensors()) == manifest.digest, "the proof on the host says the same"
    assert (files.used, transport.fetched, transport.fallbacks) == (0, 3, 0)


def test_a_slot_that_was_overwritten_is_stale_not_torn(tmp_path: Path, trainer: Trainer) -> None:
    transport = DeviceTransport(tmp_path, torch.device("cuda"), Recorded(tmp_path))
    first, _ = trainer.publish(1)
    described = transport._described(first)
    assert described is not None
    for version in (2, 3):
        trainer.publish(version)
    # A copy that began before and ended after the slot was used again: what it holds is another version.
    slot = transport._open(described.slot)
    assert slot is not None
    transport._fetched = (described, slot.clone())
    tensors = views(transport._fetched[1], tensors_of(first))
    assert not (tmp_path / first.directory / DEVICE_FILE).exists()
    with pytest.raises(Stale, match="was replaced"):
        transport.delivered(first, tensors)
    # Asked for again it comes from its files, which are still there.
    assert digest_of(transport.fetch(first, DEADLINE_S)) == first.digest
    assert transport.fallbacks == 1


def test_damage_on_the_device_is_noticed_there(tmp_path: Path, trainer: Trainer) -> None:
    transport = DeviceTransport(tmp_path, torch.device("cuda"), Recorded(tmp_path))
    manifest, _ = trainer.publish(1)
    for damaged in (False, True):
        staged = transport.fetch(manifest, DEADLINE_S, verify=False)
        if damaged:
            next(iter(staged.values())).view(torch.uint8).view(-1)[7] ^= 1
        assert (transport.delivered(manifest, staged) == manifest.digest) is not damaged
    copied = {name: tensor.clone() for name, tensor in transport.fetch(manifest, DEADLINE_S, verify=False).items()}
    assert transport.delivered(manifest, copied) == manifest.digest, "copies are proved on the host"
    assert transport.fetch(manifest, DEADLINE_S), "and what is brought to be written in place is verified beforehand"


def test_a_trainer_that_is_gone_does_not_hurt_what_was_copied(tmp_path: Path, trainer: Trainer) -> None:
    transport = DeviceTransport(tmp_path, torch.device("cuda"), Recorded(tmp_path))
    engine = Serving(model(99).to("cuda"))
    manifest, made = trainer.publish(1)
    update(engine, transport, manifest)
    assert trainer.kill() == -signal.SIGKILL
    assert output(engine.module) == made


def test_the_digest_is_the_same_on_both_kinds_of_memory() -> None:
    memory = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    assert device_digest(memory, ()) == device_digest(memory.cuda(), ())


if __name__ == "__main__":
    train(Path(sys.argv[1]))
