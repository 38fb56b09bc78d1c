"""Builds the engine in the worker's own process."""

from __future__ import annotations

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.policy import PolicyEngine
from penstock.engines.protocol import Site
from penstock.engines.serving import ServingEngine
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection


def build(section: TorchEngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> ServingEngine:
    engine = _engine(section, policy, site)
    engine.capabilities = section.capabilities
    engine.device_at = site.device_at
    return engine


def _engine(section: TorchEngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> ServingEngine:
    if not isinstance(policy, LanguagePolicy):
        return PolicyEngine(policy.module, seed=site.seed, progressed=site.progressed)
    bounds = section.model_dump(include={"rows", "cache_tokens", "kept_tokens", "reread", "graphs"})
    return TorchEngine(
        policy.module, pad_id=policy.tokenizer.pad_id, seed=site.seed, progressed=site.progressed, **bounds
    )
