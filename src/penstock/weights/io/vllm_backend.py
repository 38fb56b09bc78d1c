"""The half of a weight update that runs inside vLLM: a transfer backend that loads versions from a run directory.

Registered through the entry point `vllm.general_plugins`, so a server started with
`--weight-transfer-config '{"backend": "penstock"}'` finds it. The whole version is verified against its manifest
before the first of its tensors reaches the model.

vLLM loads this in every one of its processes, so it is also where those of a server that a worker owns are tied to the
one that started them: none outlives the worker, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.errors import LocalProtocolError
from penstock.records.weights import Manifest
from penstock.runtime.process import die_with_parent
from penstock.weights.io.files import map_version

OWNED = "PENSTOCK_OWNS_VLLM"
"""Set in the environment of servers that a worker started; other vLLMs of this environment are left alone."""
BACKEND = "penstock"


def register() -> None:
    """Called by vLLM in every one of its processes."""
    parent = multiprocessing.parent_process()
    if OWNED in os.environ and parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, build())


def build() -> type[Any]:
    """The backend class; made on demand, because its base exists only where vLLM does."""
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
    class InitInfo(WeightTransferInitInfo):
        run_dir: str

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        manifest: dict[str, Any]

    class FileTransferEngine(WeightTransferEngine):
        """Loads a version in checkpoint format, layer by layer."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        run_dir: Path | None = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.run_dir = Path(init_info.run_dir)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if self.run_dir is None:
                raise LocalProtocolError("the transfer backend was not told its run directory: initialise it first")
            manifest = msgspec.convert(update_info.manifest, Manifest)
            # Complete and verified before the first tensor is touched: a layer that got only some of its tensors
            # counts the next attempt's on top and cannot be loaded any more.
            tensors = map_version(self.run_dir, manifest)
            self.model.load_weights([(name, tensor.to(self.device)) for name, tensor in tensors.items()])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    return FileTransferEngine
