"""Versions in the trainer's device memory, with host memory in place of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from penstock.errors import RemoteProtocolError
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.weights.io import device
from penstock.weights.io.device import DEVICE_FILE, DeviceCopy, DeviceTransport, SlotHandle, placement, views
from penstock.weights.io.device_digest import device_digest
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.manifest import tensors_of

GPU = "GPU-1"


class Memory:
    """The slots that CUDA can open, by handle."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.slots: dict[bytes, torch.Tensor] = {}
        self.refused = 0

    def open(self, handle: SlotHandle, target: torch.device) -> torch.Tensor:
        if handle.handle not in self.slots:
            self.refused += 1
            raise RuntimeError("CUDA error: invalid resource handle")
        return self.slots[handle.handle]

    def publish(self, lineage: str, version: int, *, alive: bool) -> Manifest:
        """A version of a trainer; only the slots of one that is alive can be opened."""
        weights = {"w": torch.full((64,), float(version))}
        manifest = Publisher(self.run_dir, lineage).publish(Version(version), weights)
        specs = tensors_of(manifest)
        slot = torch.zeros(placement(specs)[1], dtype=torch.uint8)
        views(slot, specs)["w"].copy_(weights["w"])
        handle = SlotHandle(GPU, slot.numel(), lineage.encode(), slot.numel(), 0, b"", 0, b"", False)
        copy = DeviceCopy(manifest.digest, device_digest(slot, specs), handle)
        (self.run_dir / manifest.directory / DEVICE_FILE).write_bytes(msgspec.json.encode(copy))
        if alive:
            self.slots[lineage.encode()] = slot
        return manifest


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory(tmp_path)
    monkeypatch.setattr(device, "device_uuid", lambda of: GPU)
    monkeypatch.setattr(device, "_rebuild", memory.open)
    return memory


def test_memory_of_a_dead_trainer_does_not_close_that_of_its_successor(memory: Memory) -> None:
    transport = DeviceTransport(memory.run_dir, torch.device("cuda", 0), FileTransport(memory.run_dir))
    dead = memory.publish("old", 7, alive=False)
    for _ in range(2):
        assert transport.fetch(dead, 10.0)["w"][0] == 7.0
    assert memory.refused == 1, "a refused handle is not tried again"
    assert transport.fetch(memory.publish("new", 8, alive=True), 10.0)["w"][0] == 8.0
    assert (transport.fetched, transport.fallbacks) == (1, 2)


def test_a_device_file_of_other_weights_is_not_used(memory: Memory) -> None:
    """A trainer that was killed while it wrote a version leaves the file of the version before it."""
    transport = DeviceTransport(memory.run_dir, torch.device("cuda", 0), FileTransport(memory.run_dir))
    left = (memory.run_dir / memory.publish("one", 7, alive=True).directory / DEVICE_FILE).read_bytes()
    after = memory.publish("two", 8, alive=True)
    (memory.run_dir / after.directory / DEVICE_FILE).write_bytes(left)
    for verify in (True, False):
        assert transport.fetch(after, 10.0, verify=verify)["w"][0] == 8.0
    assert (transport.fetched, transport.fallbacks) == (0, 2)


def test_a_damaged_slot_is_not_what_was_published(memory: Memory) -> None:
    transport = DeviceTransport(memory.run_dir, torch.device("cuda", 0), FileTransport(memory.run_dir))
    manifest = memory.publish("one", 7, alive=True)
    memory.slots[b"one"][5] ^= 1
    with pytest.raises(RemoteProtocolError, match="the copy on the device is not"):
        transport.fetch(manifest, 10.0)
    staged = transport.fetch(manifest, 10.0, verify=False)
    assert transport.delivered(manifest, staged) != manifest.digest
    assert transport.fetched == 2
