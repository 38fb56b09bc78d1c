"""Builds the engine in the worker's process, and its shards in the processes of other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.policy import PolicyEngine
from penstock.engines.protocol import Site
from penstock.engines.ranks import EngineRankAssignment, connected
from penstock.engines.serving import ServingEngine
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection
from penstock.engines.torch.shards import ShardGroup, Shards
from penstock.engines.torch.support import check_served
from penstock.runtime.tensors import device_of

__all__ = ["build", "check_served", "follow"]


def build(section: TorchEngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> ServingEngine:
    engine = _engine(section, policy, site)
    engine.capabilities = section.capabilities
    # Of a sharded model the shards are on devices, and the whole stays in host memory.
    engine.device_at = site.device_at if site.ranks is None else lambda devices: torch.device("cpu")
    return engine


def _engine(section: TorchEngineSection, policy: LanguagePolicy | ActorCriticPolicy, site: Site) -> ServingEngine:
    if not isinstance(policy, LanguagePolicy):
        return PolicyEngine(policy.module, seed=site.seed, progressed=site.progressed)
    check_served(policy.module.config)
    shards = None
    if (ranks := site.ranks) is not None:
        device = _device(site.device, site.process.index, 0, ranks.count)
        shards = Shards(policy.module, ShardGroup(ranks.store, 0, ranks.count, ranks.sockets, device))
    return TorchEngine(
        policy.module,
        section,
        pad_id=policy.tokenizer.pad_id,
        seed=site.seed,
        progressed=site.progressed,
        shards=shards,
    )


def follow(
    section: Any, policy: LanguagePolicy | ActorCriticPolicy, seat: EngineRankAssignment, device: str, index: int
) -> None:
    """Runs another rank of the engine from `build`, until it ends. `index` is the worker's index in its pipeline."""
    assert isinstance(section, TorchEngineSection)
    chosen = _device(device, index, seat.rank, seat.ranks)
    with connected(seat) as commands:
        group = ShardGroup(Path(seat.store), seat.rank, seat.ranks, [commands], chosen)
        Shards(policy.module, group).follow(section.rows, section.cache_tokens, graphs=section.graphs)


def _device(name: str, index: int, rank: int, ranks: int) -> torch.device:
    """Each rank has its own GPU; the ranks of a worker have consecutive ones."""
    device = device_of(name)
    if device.type != "cuda":
        return device
    chosen = torch.device("cuda", (index * ranks + rank) % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen
