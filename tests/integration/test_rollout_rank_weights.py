"""A rank's weights: heard of with the fetch, loaded while awake, waited for before anything is generated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from penstock.records.ids import Version
from penstock.records.weights import NOTHING_HELD, Held, Manifest
from penstock.rollout.io.rank_weights import RankWeights


def manifest(version: int) -> Manifest:
    return Manifest(Version(version), "lineage", f"digest {version}", (), f"weights/{version}")


class FakeEngine:
    def __init__(self) -> None:
        self.version = 0
        self.digest = ""
        self.asleep = False
        self.devices: tuple[int, ...] = ()
        self.interrupted = False

    @property
    def held(self) -> Held:
        return Held(Version(self.version), self.digest)

    def load(self, loaded: Manifest) -> None:
        self.version, self.digest = loaded.version, loaded.digest

    async def vacate(self, timeout_s: float) -> None:
        self.asleep = True

    async def check_vacated(self, timeout_s: float) -> None:
        assert self.asleep

    async def occupy(self, devices: tuple[int, ...], timeout_s: float) -> None:
        self.asleep = False
        self.devices = devices

    def interrupt(self) -> None:
        self.interrupted = True

    def resume(self) -> None:
        self.interrupted = False


async def test_unproven_weights_are_waited_for_and_older_ones_too(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    weights = RankWeights(engine, lambda doing: None, tmp_path / "newest")
    waiting = asyncio.ensure_future(asyncio.to_thread(weights.wait_for, Version(2)))
    for version in (0, 1, 2):
        assert not waiting.done(), "neither nothing nor an older version will do"
        await asyncio.to_thread(weights.announced, manifest(version))
        heard = await weights.next_manifest(engine.held, 10.0)
        assert heard == manifest(version)
        engine.load(manifest(version))
        await asyncio.sleep(0)
    assert await asyncio.wait_for(waiting, 20)
    assert await weights.next_manifest(engine.held, 0.01) is None


async def test_a_resting_rank_sleeps_and_loads_nothing(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    weights = RankWeights(engine, lambda doing: None, tmp_path / "newest")
    await asyncio.to_thread(weights.rest)
    assert engine.asleep
    await asyncio.to_thread(weights.announced, manifest(1))
    assert await weights.next_manifest(NOTHING_HELD, 0.05) is None
    await asyncio.to_thread(weights.wake, (2, 3))
    assert not engine.asleep
    assert engine.devices == (2, 3), "where the order says"
    assert await weights.next_manifest(NOTHING_HELD, 10.0) == manifest(1)


async def test_a_rank_that_waits_hears_of_newer_weights_without_a_fetch(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    weights = RankWeights(engine, lambda doing: None, tmp_path / "newest")
    waiting = asyncio.ensure_future(asyncio.to_thread(weights.wait_for, Version(5)))
    (tmp_path / "newest").write_bytes(msgspec.json.encode(manifest(7)))
    heard = await weights.next_manifest(NOTHING_HELD, 30.0)
    assert heard == manifest(7)
    engine.load(manifest(7))
    assert await asyncio.wait_for(waiting, 20)


async def test_an_interruption_ends_the_waiting_until_the_rank_is_woken(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    weights = RankWeights(engine, lambda doing: None, tmp_path / "newest")
    weights.interrupt()
    assert not await asyncio.to_thread(weights.wait_for, Version(1))
    assert engine.interrupted
    await asyncio.to_thread(weights.wake, (0,))
    assert not engine.interrupted
