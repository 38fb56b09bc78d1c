"""All engines by `engine.kind`: each a folder with its table in `settings` and `build.build`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from penstock.engines.http.settings import HttpEngineSection
from penstock.engines.section import EngineSection
from penstock.engines.torch.settings import TorchEngineSection
from penstock.engines.vllm.settings import VllmEngineSection

SECTIONS: dict[str, type[EngineSection]] = {
    "torch": TorchEngineSection,
    "vllm": VllmEngineSection,
    "http": HttpEngineSection,
}


def _engine_kind(engine: Any) -> str:
    """`torch` by default."""
    return engine.get("kind", "torch") if isinstance(engine, dict) else engine.kind


if TYPE_CHECKING:
    Engine = EngineSection
else:
    Engine = Annotated[
        Union[tuple(Annotated[section, Tag(kind)] for kind, section in SECTIONS.items())],  # noqa: UP007
        Discriminator(_engine_kind),
    ]
