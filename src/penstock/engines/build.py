"""From the configuration table to the engine, through the folder that the table names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.protocol import BareEngine, Site
from penstock.engines.section import EngineSection


def build_engine(section: EngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> BareEngine:
    """The engine that serves a policy: an `Engine`, unless its `capabilities.weights` is "none". It has no digest:
    it may not serve before published weights are loaded."""
    return import_module(f"penstock.engines.{section.kind}.build").build(section, policy, site)


def check_served(section: EngineSection, config: Any) -> None:
    """Raises ConfigError if this engine cannot serve a language model with this config of transformers."""
    check = getattr(import_module(f"penstock.engines.{section.kind}.build"), "check_served", None)
    if check is not None:
        check(config)
