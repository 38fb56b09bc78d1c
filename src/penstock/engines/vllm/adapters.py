"""Adapters of a vLLM server: each version is one adapter with its own name, loaded beside those in use.

Generation is not paused: completions in flight end with the adapter they began with, later ones use the new adapter. An
adapter that is not the newest and has no completion in flight is unloaded. The server reads the base model when it
starts; it never changes.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch

from penstock.engines.models import ADAPTER_FILE, AdaptedPolicy
from penstock.engines.vllm.weights import VllmEngine
from penstock.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from penstock.records.weights import Manifest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that the server accepts."""
DEFAULT = ".default."
"""Part of tensor names in memory that peft omits in files."""


def rank_of(policy: AdaptedPolicy) -> int:
    """The smallest rank that the server accepts and that holds the adapter's."""
    needed = _config_of(policy).r
    return next((rank for rank in RANKS if rank >= needed), needed)


def export_base(policy: AdaptedPolicy, directory: Path) -> Path:
    """Writes the frozen model for the server, once for all workers."""
    if directory.exists():
        return directory
    module: Any = policy.module
    config = copy.deepcopy(module.get_base_model().config)
    config.architectures = [type(module.get_base_model()).__name__]
    tensors = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor.detach().cpu().contiguous()
        for name, tensor in module.named_parameters()
        if ".lora_" not in name
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))  # each worker has its own
    config.save_pretrained(writing)
    safetensors.torch.save_file(tensors, writing / "model.safetensors", metadata={"format": "pt"})
    try:
        writing.rename(directory)
    except OSError:  # another worker was first
        shutil.rmtree(writing)
    return directory


class VllmAdapters(VllmEngine):
    """One server as the engine *and* the transport of a `ReplicaUpdater` with `way="staged"`."""

    def __init__(
        self,
        address: str,
        run_dir: Path,
        home: Path,
        policy: AdaptedPolicy,
        *,
        exit_reason: Callable[[], str] = lambda: "",
        runs: Callable[[], bool] = lambda: True,
    ) -> None:
        """`home` is a directory for the files of loaded adapters, and for versions that were fetched."""
        super().__init__(address, run_dir, home, exit_reason=exit_reason, runs=runs)
        self._config = copy.copy(_config_of(policy))
        self._config.inference_mode = True
        self._newest: Manifest | None = None
        self._staged = ""
        self._serving = ""
        """The name of the adapter that completions begin with."""
        self._loaded_names: list[str] = []
        self._users: Counter[str] = Counter()
        self._choosing = threading.Lock()
        """Completions begin on the event loop, adapters change in the updater's thread."""

    def forget(self) -> None:
        super().forget()
        self._staged = self._serving = ""
        self._loaded_names.clear()

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        self._newest = manifest
        return super().fetch(manifest, timeout_s, verify=verify)

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the adapter's files and has the server load them, under a new name."""
        if self._newest is None:
            raise LocalProtocolError("no adapter was fetched, so none can be staged")
        name = f"v{self._newest.version}-{self._newest.digest[:16]}"
        directory = self._home / name
        directory.mkdir(parents=True, exist_ok=True)
        named = {_in_file(key): tensor.contiguous() for key, tensor in tensors.items()}
        safetensors.torch.save_file(named, directory / ADAPTER_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(directory)
        self._staged = name
        if name not in self._loaded_names:
            self._post("/v1/load_lora_adapter", lora_name=name, lora_path=str(directory))
            self._loaded_names.append(name)

    def staged_tensors(self) -> Mapping[str, torch.Tensor]:
        """From the file that the server has read."""
        found = safetensors.torch.load_file(self._home / self._staged / ADAPTER_FILE)
        return {_in_memory(name): tensor for name, tensor in found.items()}

    def swap(self, version: int, digest: str, timeout_s: float) -> float:
        with self._choosing:
            self._serving, self.version, self.digest = self._staged, version, digest
        self._unload_unused()
        return 0.0

    def relabel(self, version: int, timeout_s: float) -> None:
        with self._choosing:
            self.version = version

    def served_digest(self) -> str:
        """Of the adapter that completions begin with, if it is still loaded; else empty."""
        models = self._call("GET", "/v1/models", 60.0)["data"]
        return self.digest if self._serving in {model["id"] for model in models} else ""

    @contextmanager
    def in_use(self) -> Iterator[tuple[str, int, str]]:
        """The adapter for one completion, with its version and digest; it stays loaded until the completion ends."""
        with self._choosing:
            chosen = name, _, _ = self._serving, self.version, self.digest
            self._users[name] += 1
        try:
            yield chosen
        finally:
            with self._choosing:
                self._users[name] -= 1

    def _unload_unused(self) -> None:
        with self._choosing:
            unused = [name for name in self._loaded_names if name != self._serving and not self._users[name]]
        for name in unused:
            self._post("/v1/unload_lora_adapter", lora_name=name)
            self._loaded_names.remove(name)
            del self._users[name]
            shutil.rmtree(self._home / name, ignore_errors=True)

    def _post(self, path: str, **body: Any) -> None:
        try:
            reply = self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise PeerLost(f"the vLLM server was lost at {path}: {self._exit_reason() or error}") from error
        if reply.is_error:
            raise RemoteProtocolError(f"the vLLM server answered {path} with {reply.status_code}: {reply.text[:300]}")


def _config_of(policy: AdaptedPolicy) -> Any:
    module: Any = policy.module
    return module.peft_config["default"]


def _in_file(name: str) -> str:
    return name.replace(DEFAULT, ".")


def _in_memory(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{stem}{DEFAULT}{last}"
