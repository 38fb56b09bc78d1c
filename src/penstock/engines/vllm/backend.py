"""The half of a weight update that runs inside vLLM: a transfer backend that loads published versions.

Registered through the entry point `vllm.general_plugins`, so a server started with
`--weight-transfer-config '{"backend": "penstock"}'` finds it. The whole version is verified against its manifest
before the first of its tensors reaches the model. `MemoryCheck` then verifies the parameters in device memory: the
server's own checksums copy every parameter to the host and hash it there, seconds for a large model at every version.

vLLM loads this module in each of its processes. It ties those of a worker's server to the process that started them, so
that none outlives the worker, however the worker ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.engines.vllm.leftovers import name_shared_memory
from penstock.errors import RemoteProtocolError
from penstock.records.weights import Manifest
from penstock.runtime.parent import die_with_parent
from penstock.weights.io.device import DeviceTransport
from penstock.weights.io.device_digest import scattered_digest
from penstock.weights.io.files import FileTransport
from penstock.weights.io.neighbours import WeightTransport

OWNED = "PENSTOCK_OWNS_VLLM"
"""Set in the environment of servers that a worker started; other vLLMs of this environment are left alone."""
BACKEND = "penstock"
FETCH_S = 300.0
"""For one version; the caller has a shorter deadline for the whole update."""


def register() -> None:
    """Called by vLLM in each of its processes."""
    parent = multiprocessing.parent_process()
    if OWNED in os.environ:
        log_to_the_server()
        name_shared_memory()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, build())


def log_to_the_server() -> None:
    """Writes this package's log lines, such as the transport of each version, into the server's log."""
    ours = logging.getLogger("penstock")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


def build() -> type[Any]:
    """The backend class; built on demand, because its base class needs vLLM."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo): ...

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        root: str
        manifest: dict[str, Any]

    class VersionTransferEngine(WeightTransferEngine):
        """Loads a version in checkpoint format, layer by layer."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        wanted: frozenset[str] = frozenset()
        """Names of the parameters; of tied ones, only the first."""

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.transports: dict[str, WeightTransport] = {}

        def start_weight_update(self) -> None:
            if not self.wanted:
                self.wanted = frozenset(name for name, _ in self.model.named_parameters())
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            manifest = msgspec.convert(update_info.manifest, Manifest)
            if update_info.root not in self.transports:
                self.transports[update_info.root] = transport_to(self.device, Path(update_info.root))
            # Complete and verified before the first tensor is touched: a layer that received only some of its tensors
            # counts those of the next attempt on top, and can no longer be loaded.
            tensors = self.transports[update_info.root].fetch(manifest, FETCH_S)
            loaded = self.model.load_weights([(name, tensor.to(self.device)) for name, tensor in tensors.items()])
            # Missing ones would keep their old values: random, or those of an older version.
            if loaded is not None and (missing := self.wanted - loaded):
                raise RemoteProtocolError(
                    f"{len(missing)} of the server's {len(self.wanted)} parameters are not in the published version, "
                    f"the first is {min(missing)!r}: the server has another model than the trainer"
                )

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_tied_layers(self.model)

        def shutdown(self) -> None: ...

    return VersionTransferEngine


class MemoryCheck:
    """Methods that vLLM adds to each process with a part of the model (`--worker-extension-cls`).

    They raise instead of returning a result: of several copies of the model, the caller receives only one result.
    """

    model_runner: Any
    PENSTOCK_KEPT = 8
    """Versions whose digests are stored."""

    def penstock_loaded(self, digest: str, before: str) -> None:
        """This version was loaded over the version `before`: stores the digest of the memory that now holds it."""
        found, stored = self.penstock_digest(), self.penstock_stored()
        if stored.get(digest, found) != found:
            raise RemoteProtocolError(f"version {digest} was loaded again, and its memory differs from the first time")
        if before not in ("", digest) and stored.get(before) == found:
            raise RemoteProtocolError(f"version {digest} was loaded, but the memory still holds {before}")
        stored[digest] = found
        while len(stored) > self.PENSTOCK_KEPT:
            del stored[next(iter(stored))]

    def penstock_holds(self, digest: str) -> None:
        """Raises unless the memory is unchanged since this version was loaded."""
        if self.penstock_stored().get(digest) != self.penstock_digest():
            raise RemoteProtocolError(f"the memory does not hold version {digest}")

    def penstock_digest(self) -> str:
        return scattered_digest(self.model_runner.get_model().named_parameters())

    def penstock_stored(self) -> dict[str, str]:
        """By the digest of a version, the digest of the memory that held it."""
        return self.__dict__.setdefault("penstock_memory", {})


def transport_to(device: torch.device, root: Path) -> WeightTransport:
    """From the trainer's memory if that is on the same device, else from files."""
    files = FileTransport(root)
    return DeviceTransport(root, device, files) if device.type == "cuda" else files


def refresh_tied_layers(model: torch.nn.Module) -> None:
    """Repacks layers whose weight is tied to another layer's.

    On CPU a linear layer computes with a packed copy of its weight. If it is tied to the embedding, only the embedding
    is loaded, and the packed copy would keep the old weights; no checksum of parameters could detect it.
    """
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.device.type != "cpu" or not weight.numel():
            continue
        if owners.setdefault(weight.data_ptr(), layer) is not layer and hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]
