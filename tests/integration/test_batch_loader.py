"""The feed fetches and packs in threads, and uses the memory of a finished step again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.batch.advantage import dr_grpo
from penstock.batch.codec import encode
from penstock.batch.pack import PackSettings, TokenMicroBatch
from penstock.payload.io.fetch import BatchFetcher
from penstock.payload.io.mapping import Mapping
from penstock.payload.io.shm import Ring
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import PromptIndex, SampleId, StepIndex, Version
from penstock.runtime.offload import Offload
from penstock.train.data import BatchLoader, DataLoader, PreparedBatch
from penstock.wire.messages import NotYet

TOKENS = 300


def sample(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {
        "token_ids": rng.integers(1, 1000, TOKENS, dtype=np.int32),
        "loss_mask": np.r_[np.zeros(100), np.ones(TOKENS - 100)].astype(np.uint8),
        "logprobs": -rng.random(TOKENS, dtype=np.float32),
        "routed_experts": rng.integers(0, 255, (TOKENS, 4, 2), dtype=np.uint8),
    }


class Bench:
    """A ring with a producer, and a feed that reads it without a controller."""

    def __init__(self, folder: Path) -> None:
        self.ring = Ring.create("run", capacity_bytes=1 << 20, slots=16, directory=str(folder))
        self.fetcher = BatchFetcher(host_id="here", directory=str(folder))
        self.offload = Offload(3, "feed")
        settings = PackSettings(micro_batch_tokens=2 * TOKENS, layout="padded")
        self.feed = BatchLoader(self.fetcher, self.offload, dr_grpo, settings)

    def prepare(self, step: int) -> PreparedBatch:
        """Two groups of four samples."""
        groups = []
        for prompt in range(2):
            numbers = [100 * step + 4 * prompt + member for member in range(4)]
            refs = tuple(self.ring.fill(encode(sample(number)), timeout_s=10) for number in numbers)
            ids = tuple(SampleId(number) for number in numbers)
            rewards, versions = (0.0, 0.0, 1.0, 1.0), (Version(0),) * 4
            groups.append(BatchGroup(PromptIndex(prompt), 0, ids, rewards, versions, (TOKENS,) * 4, refs))
        rings = (self.ring.address(host_id="here"),)
        share = self.offload.submit(self.feed.fetch_share, Batch(StepIndex(step), tuple(groups)), rings).result(60)
        advantages = self.feed.advantages_of(share.groups, share.facts)
        return self.offload.submit(self.feed.pack_share, share, advantages).result(60)

    def close(self) -> None:
        self.fetcher.close()
        self.ring.close()
        assert self.offload.close(10)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def packed_sequences(batch: PreparedBatch) -> set[bytes]:
    found = set()
    for micro_batch in batch.micro_batches:
        assert isinstance(micro_batch, TokenMicroBatch)
        for row in range(len(micro_batch.token_ids_RT)):
            experts = micro_batch.routed_experts_RTLK
            assert experts is not None
            found.add(micro_batch.token_ids_RT[row].tobytes() + experts[row].tobytes())
    return found


def wanted(step: int) -> set[bytes]:
    samples = [sample(100 * step + number) for number in range(8)]
    return {one["token_ids"].tobytes() + one["routed_experts"].tobytes() for one in samples}


def test_memory_is_used_again_only_after_the_step_is_done(bench: Bench) -> None:
    first = bench.prepare(0)
    second = bench.prepare(1)  # prepared while the first one trains
    assert packed_sequences(first) == wanted(0)
    assert packed_sequences(second) == wanted(1)
    places = {memory.ctypes.data for memory in first.memory}
    assert len(places) == len(first.micro_batches) == 4
    assert not places & {memory.ctypes.data for memory in second.memory}

    first.done()
    assert bench.ring.statistics().reading == 8, "the second step still holds its payloads"
    third = bench.prepare(2)
    assert {memory.ctypes.data for memory in third.memory} == places
    assert packed_sequences(second) == wanted(1)
    assert packed_sequences(third) == wanted(2)
    second.done()
    third.done()
    assert bench.ring.statistics().free == 16


def test_payloads_in_locked_slots_are_freed_with_the_next_step(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.payload.io.mapping.SLOT_LOCK_TIMEOUT_S", 0.01)
    first, second = bench.prepare(0), bench.prepare(1)
    stopped = Mapping.open(bench.ring.name, str(tmp_path))
    stopped.lock(0)
    first.done()
    assert bench.ring.statistics().reading == 16
    stopped.unlock(0)
    stopped.close()
    second.done()
    assert bench.ring.statistics().free == 16


def test_a_group_with_a_missing_payload_is_left_out_whole(bench: Bench) -> None:
    discard = bench.ring.fill
    refs: list[Any] = []

    def remember(*arguments: Any, **options: Any) -> Any:
        refs.append(discard(*arguments, **options))
        if len(refs) == 3:
            bench.ring.discard(refs[2:])
        return refs[-1]

    bench.ring.fill = remember  # type: ignore[method-assign]
    batch = bench.prepare(0)
    assert batch.missing_prompts == (0,)
    assert "stale" in batch.missing_reason
    assert [group.prompt for group in batch.groups] == [1]
    assert len(packed_sequences(batch)) == 4
    assert batch.advantages.tolist() == [-0.5, -0.5, 0.5, 0.5]
    batch.done()


async def test_waiting_for_the_next_batch_is_progress_only_while_nothing_else_is_done() -> None:
    """Or a trainer that hangs in a step would seem to make progress for ever, by its feed."""
    told: list[str] = []

    class Controller:
        pipeline = "p"
        asks = 0

        async def call(self, request: Any) -> NotYet:
            self.asks += 1
            feed.awaited = self.asks == 2
            stop.requested = self.asks == 3
            return NotYet("groups", "running")

    stop = SimpleNamespace(requested=False)
    process: Any = SimpleNamespace(stop=stop, member="t", progress=SimpleNamespace(moved=told.append))
    controller, unused = Controller(), None
    feed = DataLoader(process, controller, unused, unused)  # type: ignore[arg-type]
    assert await feed.prepare(StepIndex(7)) is None
    assert controller.asks == 3
    assert told == ["waiting for the batch of step 7: groups"]
