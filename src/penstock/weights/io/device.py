"""Versions in device memory, for replicas on the trainer's GPU: copied on the device, not through the host.

The trainer keeps its newest versions in a few slots of device memory. A small file beside each version's files states
which slot holds it and how another process opens that slot (CUDA IPC); the processes share the run directory, so
no other user can read it. A slot is reused for a later version. The file is removed before, so a replica that was too
slow detects that its copy is a mixture, and requests the newest version.

Delivery is verified on the device (`device_digest`): the copy of the replica is compared with the published version,
without a copy to the host. If this transport cannot be used (another device, another host, a driver that refuses), the
replica fetches the version by its fallback transport.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from penstock.errors import LocalProtocolError, RemoteProtocolError, Stale
from penstock.records.weights import Manifest, TensorSpec
from penstock.runtime.tensors import OwnedTensors
from penstock.weights.buckets import DTYPES, size_of
from penstock.weights.io.device_digest import device_digest
from penstock.weights.io.digest import digest_of, flat_bytes, torch_dtype
from penstock.weights.io.neighbours import WeightTransport
from penstock.weights.manifest import check_manifest, describe, tensors_of
from penstock.wire.codec import DAMAGED

logger = logging.getLogger(__name__)

DEVICE_FILE = "device.json"
_ALIGN_BYTES = 256


class SlotHandle(msgspec.Struct, frozen=True):
    """How another process opens a slot of device memory."""

    device_uuid: str
    size_bytes: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_wanted: bool


class DeviceCopy(msgspec.Struct, frozen=True):
    """The content of a version's device file."""

    digest: str
    """Of the version, as in its manifest."""
    device_digest: str
    slot: SlotHandle


def placement(tensors: tuple[TensorSpec, ...]) -> tuple[dict[str, int], int]:
    """The offset of each tensor in a slot, and the size of the slot: the same for both sides."""
    offsets: dict[str, int] = {}
    end = 0
    for tensor in tensors:
        offsets[tensor.name] = end
        end += -(-size_of(tensor) // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, end


def views(flat: torch.Tensor, tensors: tuple[TensorSpec, ...]) -> OwnedTensors:
    """The tensors of a version as views of a slot, or of a copy of one."""
    typed: dict[str, torch.Tensor] = {}
    found = OwnedTensors()
    start = 0
    for tensor in tensors:
        if tensor.dtype not in typed:
            typed[tensor.dtype] = flat.view(torch_dtype(tensor.dtype))
        element_bytes, size = DTYPES[tensor.dtype][1], size_of(tensor)
        first = start // element_bytes
        found[tensor.name] = typed[tensor.dtype][first : first + size // element_bytes].view(tensor.shape)
        start += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return found


def device_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def is_on_a_device(run_dir: Path, manifest: Manifest) -> bool:
    """Whether the trainer keeps the version in the memory of a GPU of this host."""
    return (run_dir / manifest.directory / DEVICE_FILE).exists()


class DeviceExport:
    """The trainer's side. Used by one thread at a time; exists as long as the trainer."""

    def __init__(self, run_dir: Path, *, slots: int = 2) -> None:
        self._run_dir = run_dir
        self._count = slots
        self._slots: list[tuple[torch.Tensor, SlotHandle]] = []
        self._described: dict[int, Path] = {}
        self._turn = 0
        self._refused = ""

    def __repr__(self) -> str:
        return f"DeviceExport({len(self._slots)} slots, {self._turn} versions{self._refused})"

    def offer(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keeps the version on the device of its tensors; False if that is not possible."""
        devices = {tensor.device for tensor in tensors.values()}
        if self._refused or len(devices) != 1 or next(iter(devices)).type != "cuda":
            return False
        specs = tensors_of(manifest)
        try:
            slot, handle = self._take_slot(next(iter(devices)), placement(specs)[1])
        except RuntimeError as error:  # no memory left, or a driver that cannot share
            self._refused = f", refused: {error}"
            logger.warning("versions are not kept on the device: %s", error)
            return False
        kept = views(slot, specs)
        targets, sources = [kept[spec.name] for spec in specs], [tensors[spec.name] for spec in specs]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        copy = DeviceCopy(manifest.digest, device_digest(slot, specs), handle)  # waits for the copies
        path = self._run_dir / manifest.directory / DEVICE_FILE
        writing = path.with_suffix(".writing")
        writing.write_bytes(msgspec.json.encode(copy))
        os.replace(writing, path)
        self._described[self._turn % self._count] = path
        self._turn += 1
        return True

    def _take_slot(self, device: torch.device, size_bytes: int) -> tuple[torch.Tensor, SlotHandle]:
        """The slot of the oldest version, whose file is removed."""
        turn = self._turn % self._count
        if turn in self._described:
            self._described.pop(turn).unlink(missing_ok=True)
        if turn < len(self._slots) and self._slots[turn][0].numel() == size_bytes:
            return self._slots[turn]
        slot = torch.zeros(size_bytes, dtype=torch.uint8, device=device)  # the gaps between tensors are hashed too
        self._slots[turn : turn + 1] = [(slot, _handle_of(slot))]
        return self._slots[turn]


def _handle_of(slot: torch.Tensor) -> SlotHandle:
    arguments: Any = reduce_tensor(slot)[1]
    (handle, storage_bytes, storage_offset), (counter, counter_offset, event, wanted) = arguments[7:10], arguments[11:]
    return SlotHandle(
        device_uuid(slot.device),
        slot.numel(),
        bytes(handle),
        int(storage_bytes),
        int(storage_offset),
        bytes(counter),
        int(counter_offset),
        bytes(event),
        bool(wanted),
    )


class DeviceTransport:
    """A replica's side: one copy, into new memory that the engine may serve directly."""

    def __init__(self, run_dir: Path, device: torch.device, fallback: WeightTransport) -> None:
        if device.type != "cuda":
            raise LocalProtocolError(f"versions can be shared on a CUDA device only, not on {device}")
        self._run_dir = run_dir
        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._uuid = device_uuid(self._device)
        self._fallback = fallback
        self._opened: dict[SlotHandle, torch.Tensor] = {}
        self._fetched: tuple[DeviceCopy, torch.Tensor] | None = None
        """The device file of the version that was fetched last, and the copy of it."""
        self._refused: set[SlotHandle] = set()
        """Slots that could not be opened: of a trainer that is dead, or all if the driver cannot share."""
        self.fetched = 0
        self.fallbacks = 0

    def __repr__(self) -> str:
        return (
            f"DeviceTransport({self._device}, {self.fetched} on the device, {self.fallbacks} otherwise, "
            f"{len(self._refused)} slots refused)"
        )

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        check_manifest(manifest)
        self._fetched = None
        copy = self._described(manifest)
        slot = self._open(copy.slot) if copy is not None else None
        if copy is None or slot is None:
            self.fallbacks += 1
            return self._fallback.fetch(manifest, timeout_s, verify=verify)
        specs = tensors_of(manifest)
        if slot.numel() != placement(specs)[1]:
            raise RemoteProtocolError(f"{describe(manifest)} does not fit the slot of {slot.numel()} bytes it is in")
        try:
            flat = torch.empty_like(slot)
        except torch.OutOfMemoryError as error:
            self.fallbacks += 1
            logger.warning("no device memory for a second copy of the weights, fetching through the host: %s", error)
            return self._fallback.fetch(manifest, timeout_s, verify=verify)
        self.fetched += 1
        if self.fetched == 1:
            logger.info("versions are copied from the trainer's memory on this device")
        flat.copy_(slot)
        self._fetched = (copy, flat)
        tensors = views(flat, specs)
        if verify and self.delivered(manifest, tensors) != manifest.digest:
            raise RemoteProtocolError(f"the copy on the device is not {describe(manifest)}")
        return tensors

    def delivered(self, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> str:
        """The manifest's digest if these are, bit for bit, the weights published under it; else another value."""
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched[0].digest != manifest.digest or not _are_views(fetched[1], staged, manifest):
            return digest_of(staged)
        copy, flat = fetched
        found = device_digest(flat, tensors_of(manifest))
        if found == copy.device_digest:
            return manifest.digest
        if self._described(manifest) != copy:
            raise Stale(f"{describe(manifest)} was replaced by a newer version while it was copied")
        return found

    def _described(self, manifest: Manifest) -> DeviceCopy | None:
        """The device file of the version, if the trainer keeps it on this device."""
        try:
            body = (self._run_dir / manifest.directory / DEVICE_FILE).read_bytes()
        except FileNotFoundError:
            return None
        try:
            copy = msgspec.json.decode(body, type=DeviceCopy)
        except DAMAGED as error:
            raise RemoteProtocolError(f"{describe(manifest)}: {DEVICE_FILE} is damaged: {error}") from error
        return copy if copy.slot.device_uuid == self._uuid and copy.digest == manifest.digest else None

    def _open(self, handle: SlotHandle) -> torch.Tensor | None:
        if handle in self._refused:
            return None
        if handle not in self._opened:
            if len(self._opened) >= 8:  # most are of earlier trainers
                self._opened.clear()
            try:
                self._opened[handle] = _rebuild(handle, self._device)
            except RuntimeError as error:
                self._refused.add(handle)
                logger.warning("the trainer's device memory cannot be opened, fetching through the host: %s", error)
                return None
        return self._opened[handle]


def _are_views(flat: torch.Tensor, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> bool:
    """Whether the tensors are views of this memory, not copies."""
    offsets, _ = placement(tensors_of(manifest))
    base = flat.data_ptr()
    return tensors.keys() == offsets.keys() and all(
        tensor.data_ptr() == base + offsets[name] for name, tensor in tensors.items() if tensor.numel()
    )


def _rebuild(handle: SlotHandle, device: torch.device) -> torch.Tensor:
    arguments: Any = (
        torch.Tensor,
        (handle.size_bytes,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device.index,
        handle.handle,
        handle.storage_bytes,
        handle.storage_offset,
        False,
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.event_wanted,
    )
    return flat_bytes(rebuild_cuda_tensor(*arguments))
