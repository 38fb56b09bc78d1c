"""The engines there are, by `engine.kind`: each a folder with its table in `settings` and `build.build`."""

from __future__ import annotations

from penstock.engines.http.settings import HttpEngineSection
from penstock.engines.section import EngineSection
from penstock.engines.torch.settings import TorchEngineSection
from penstock.engines.vllm.settings import VllmEngineSection

SECTIONS: dict[str, type[EngineSection]] = {
    "torch": TorchEngineSection,
    "vllm": VllmEngineSection,
    "http": HttpEngineSection,
}
