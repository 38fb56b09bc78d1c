"""Builds the engine of a server that the user runs."""

from __future__ import annotations

import os

from penstock.engines.http.engine import HttpEngine
from penstock.engines.http.settings import HttpEngineSection
from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.protocol import Site
from penstock.errors import ConfigError


def build(section: HttpEngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> HttpEngine:
    if not isinstance(policy, LanguagePolicy):
        raise ConfigError(f"pipeline {site.process.pipeline_name!r}: engine.kind = 'http' serves language models only")
    key = os.environ.get(section.api_key_env, "") if section.api_key_env else ""
    if section.api_key_env and not key:
        raise ConfigError(f"engine.api_key_env: the environment variable {section.api_key_env!r} is not set")
    return HttpEngine(section, policy.tokenizer, key=key, progressed=site.progressed)
