"""A worker that is woken generates only with weights that its own memory confirmed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.rollout.io.generation import Generation


async def test_an_engine_that_a_failed_write_left_torn_is_not_taken_for_the_version_it_is_named_after() -> None:
    """It was put to sleep and woken by the pool before another update healed it: then it drew with damaged weights."""
    asked = 0

    async def nothing_newer(*_: object) -> None:
        nonlocal asked
        asked += 1

    generation: Any = object.__new__(Generation)
    generation._engine = SimpleNamespace(version=3, digest="of version 3")
    generation._controller = SimpleNamespace(next_manifest=nothing_newer)
    generation._progressed = lambda doing: None
    generation.may_serve = lambda: asked > 2  # the updater has written it anew
    async with asyncio.timeout(10):
        assert await generation.sync_weights() == 3
    assert asked == 3


async def test_a_version_that_arrives_after_a_sleep_order_is_not_loaded() -> None:
    """The controller holds the poll for seconds: meanwhile the pool may take the device, and the trainer publish."""
    polled, published = asyncio.Event(), asyncio.Event()
    generation: Any = object.__new__(Generation)
    generation._awake = asyncio.Event()
    generation._awake.set()

    async def held(*_: object) -> str:
        polled.set()
        await published.wait()
        return "version 2"

    generation._controller = SimpleNamespace(next_manifest=held)
    async with asyncio.timeout(10):
        poll = asyncio.ensure_future(generation.next_manifest(None, 10.0))
        await polled.wait()
        generation._awake.clear()
        published.set()
        assert await poll is None
        generation._awake.set()
        assert await generation.next_manifest(None, 10.0) == "version 2"
