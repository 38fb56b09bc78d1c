"""From the configuration table to the engine, through the folder that the table names."""

from __future__ import annotations

from importlib import import_module

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.protocol import BareEngine, Site
from penstock.engines.section import EngineSection


def build_engine(section: EngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> BareEngine:
    """The engine that serves a policy: an `Engine`, unless its `capabilities.weights` is "none". It has no digest:
    it may not serve before published weights are loaded."""
    return import_module(f"penstock.engines.{section.kind}.build").build(section, policy, site)
