"""Builds the engine around a server that the worker owns."""

from __future__ import annotations

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.protocol import Site
from penstock.engines.vllm.service import VllmService
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.errors import ConfigError


def build(section: VllmEngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> VllmService:
    if not isinstance(policy, LanguagePolicy):
        raise ConfigError(f"pipeline {site.process.pipeline_name!r}: vLLM serves language models only")
    return VllmService(site, section, policy)
