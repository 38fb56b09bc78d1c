"""What every engine's configuration table says of the engine, before it is built."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from penstock.records.section import Section


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do. The rest of the system asks this, and never which engine it is."""

    requests: bool = True
    """Has many completions in flight at once, each of which starts and ends at any time."""
    ranks: bool = False
    """Works in several ranks of one worker, each with its share of every batch."""
    gymnasium: bool = False
    """Also acts for gymnasium policies."""
    weights: Literal["memory", "files", "none"] = "memory"
    """How versions reach it: tensors in the worker's memory, files that the engine reads itself, or not at all."""
    device_weights: bool = False
    """Takes versions from the trainer's device memory on the same GPU."""
    adapters: bool = False
    """Loads an adapter beside its base model instead of a whole version."""
    tensor_parallel: bool = False
    """One model over several devices."""
    sleep: bool = True
    """Frees its devices by order of the pool."""


class EngineSection(Section):
    """A table `[pipeline.engine]`. A new engine is a folder with `settings` and `build`, and a line in `registry`."""

    REQUESTS_KEY: ClassVar[str]
    """The key that says how many completions are decoded together."""
    kind: Any
    """Chooses the table."""

    @property
    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    @property
    def needs(self) -> tuple[str, str] | None:
        """What of this table needs a package here, and which: the extra that installs it has the same name."""
        return None

    @property
    def serves(self) -> str:
        """The model it serves, where that is not the pipeline's."""
        return ""

    @property
    def requests_at_once(self) -> int:
        """Completions that it decodes together."""
        return getattr(self, self.REQUESTS_KEY)

    @property
    def processes(self) -> int:
        """That one engine consists of: the worker's own, and others that the worker starts for it."""
        return 1

    @property
    def devices(self) -> int:
        """GPUs that one engine needs."""
        return self.processes

    @property
    def starting_s(self) -> float:
        """How long it may take to start, beyond loading the model."""
        return 0.0
