"""The part that the configuration tables of all engines share: the engine's properties, before it is built."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from penstock.records.section import Section


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The optional features of an engine. Code outside its folder checks these, never its class."""

    requests: bool = True
    """Has many completions in flight; each starts and ends at any time."""
    ranks: bool = False
    """Works in several ranks of one worker, each with its share of every batch."""
    gymnasium: bool = False
    """Also acts for gymnasium policies."""
    weights: Literal["memory", "files", "none"] = "memory"
    """How it receives versions: as tensors in the worker's memory, as files that the engine reads, or not at all."""
    device_weights: bool = False
    """Receives versions through the trainer's device memory on the same GPU."""
    adapters: bool = False
    """Loads an adapter next to its base model instead of a full version."""
    tensor_parallel: bool = False
    """One model over several devices."""
    sleep: bool = True
    """Frees its devices when the pool orders it."""


class EngineSection(Section):
    """A table `[pipeline.engine]`. A new engine is a folder with `settings` and `build`, and a line in `registry`."""

    REQUESTS_KEY: ClassVar[str]
    """The key that sets the number of completions decoded together."""
    kind: Any
    """Chooses the table."""

    @property
    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    @property
    def needs(self) -> tuple[str, str] | None:
        """The setting that needs a package in this environment, and the package; its extra has the same name."""
        return None

    @property
    def serves(self) -> str:
        """The model that it serves, if that is not the pipeline's."""
        return ""

    @property
    def requests_at_once(self) -> int:
        """Completions decoded together."""
        return getattr(self, self.REQUESTS_KEY)

    @property
    def processes(self) -> int:
        """Processes of one engine: the worker's, and those that the worker starts for it."""
        return 1

    @property
    def devices(self) -> int:
        """GPUs that one engine needs."""
        return self.processes

    @property
    def starting_s(self) -> float:
        """Allowed start time, beyond loading the model."""
        return 0.0
