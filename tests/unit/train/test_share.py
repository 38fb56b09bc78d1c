"""How a batch is shared out between the ranks of a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch.codec import encode
from penstock.batch.columns import reward_part_arrays
from penstock.batch.pack import PackSettings, TokenMicroBatch
from penstock.errors import InvalidTransition
from penstock.payload.io.fetch import FetchReport
from penstock.payload.retry import Failure
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.runtime.offload import Offload
from penstock.train.batch_metrics import SampleFacts
from penstock.train.data import BatchLoader, DataLoader, FetchedShare, PreparedBatch
from penstock.train.rank_calls import Answer, Done, Fetch, Fetched, Order, Pack
from penstock.train.settings import TrainSection
from penstock.train.share import shares_of, split
from penstock.wire.messages import BatchReady


def group(prompt: int, *sizes: int) -> BatchGroup:
    count = len(sizes)
    return BatchGroup(
        PromptIndex(prompt),
        0,
        tuple(SampleId(10 * prompt + i) for i in range(count)),
        (0.0,) * count,
        (Version(0),) * count,
        sizes,
        tuple(PayloadRef("ring", 0, 10 * prompt + i, 0, size, 0) for i, size in enumerate(sizes)),
    )


@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 9))
def test_every_group_is_in_exactly_one_share_and_shares_are_balanced(weights: list[int], parts: int):
    chosen = split(weights, parts)
    assert len(chosen) == parts
    assert sorted(index for mine in chosen for index in mine) == list(range(len(weights)))
    assert all(mine == sorted(mine) for mine in chosen)
    loads = [sum(weights[i] for i in mine) for mine in chosen]
    if weights:
        assert max(loads) - min(loads) <= max(weights), "no group could be moved to make them more equal"
        assert min(map(len, chosen)) > 0 or sum(weight > 0 for weight in weights) < parts


def test_groups_stay_whole_and_in_order():
    batch = Batch(StepIndex(7), (group(0, 5, 5), group(1, 90, 90), group(2, 40, 60), group(3, 80)), final=True)
    left, right = shares_of(batch, 2)
    assert [one.prompt for one in left.groups] == [0, 1]
    assert [one.prompt for one in right.groups] == [2, 3]
    assert (left.step, left.final) == (right.step, right.final) == (7, True)


def test_one_rank_has_everything_and_a_rank_may_have_nothing():
    batch = Batch(StepIndex(0), (group(0, 5, 5),))
    assert shares_of(batch, 1) == [batch]
    assert [len(share.groups) for share in shares_of(batch, 3)] == [1, 0, 0]
    assert shares_of(Batch(StepIndex(0), ()), 2) == [Batch(StepIndex(0), ())] * 2


@pytest.mark.parametrize("fault", ["none", "a payload is missing", "lost by rank 0", "lost by rank 1", "trained twice"])
async def test_every_group_of_a_batch_is_prepared_by_exactly_one_rank(fault: str):
    batch = Batch(StepIndex(0), tuple(group(prompt, 5, 5) for prompt in range(5)))
    own, other = ([one.prompt for one in share.groups] for share in shares_of(batch, 2))
    missing: tuple[PromptIndex, ...] = ()
    if fault == "a payload is missing":
        missing = (other.pop(),)
    elif fault == "trained twice":
        other.append(own[0])
    elif fault != "none":
        (own if "0" in fault else other).pop()

    class Controller:
        pipeline = "p"

        async def call(self, request: Any) -> BatchReady:
            return BatchReady(batch, ())

    class Ranks:
        def fetch(self, batch: Batch, rings: Any) -> Any:
            answer = asyncio.get_running_loop().create_future()
            facts = (SampleFacts(False, False, 5, {}),) * (2 * len(other))
            answer.set_result(Fetched(tuple(other), missing, "stale", facts))
            return batch, [answer]

        def pack(self, step: int, advantages: Any) -> Any:
            assert [len(one) for one in advantages] == [2 * len(other)]
            return []

    class Loader:
        async def fetch(self, share: Batch, rings: Any) -> Any:
            facts = (SampleFacts(False, False, 5, {}),) * (2 * len(own))
            return SimpleNamespace(prompts=tuple(own), missing_prompts=(), missing_reason="", facts=facts)

        async def judge(self, groups: Any, facts: Any) -> Any:
            assert len(facts) == 2 * len(groups)
            return np.zeros(len(facts), np.float32)

        async def pack(self, share: Any, advantages: Any) -> Any:
            return SimpleNamespace()

    process: Any = SimpleNamespace(stop=SimpleNamespace(requested=False), member="t")
    loader = DataLoader(process, Controller(), Loader(), Ranks())  # type: ignore[arg-type]
    if fault in ("none", "a payload is missing"):
        prepared = await loader.prepare(StepIndex(0))
        assert prepared is not None
        assert prepared.missing_prompts == missing
    else:
        with pytest.raises(InvalidTransition, match=r"step 0 has prompts \[0, 1, 2, 3, 4\], but its ranks fetched"):
            await loader.prepare(StepIndex(0))


class Rank:
    """A rank with a loader of its own; what it sends and receives is encoded as between processes."""

    def __init__(self, bodies: dict[PayloadRef, bytes], lost: set[PayloadRef], threads: Offload) -> None:
        def fetch(references: Iterable[PayloadRef], rings: object) -> FetchReport:
            report = FetchReport()
            for ref in references:
                if ref in lost:
                    report.missing[ref] = Failure("stale", "overwritten")
                else:
                    report.views[ref] = memoryview(bodies[ref])
            return report

        train = TrainSection(truncated="mask", overlong_tokens=4, overlong_penalty=0.5)
        settings = PackSettings(layout="padded")
        fetcher: Any = SimpleNamespace(fetch=fetch)
        self.loader = BatchLoader(fetcher, threads, over_the_batch, settings, train, max_new_tokens=9)
        self.shares: dict[int, FetchedShare] = {}
        self.packed: list[PreparedBatch] = []

    async def answer(self, order: Any) -> Any:
        order = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
        if isinstance(order, Fetch):
            share = self.shares[order.batch.step] = await self.loader.fetch(order.batch, order.rings)
            found = Fetched(share.prompts, share.missing_prompts, share.missing_reason, share.facts)
            return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Answer)
        assert isinstance(order, Pack)
        self.packed.append(await self.loader.pack(self.shares.pop(order.step), np.array(order.advantages, np.float32)))
        return Done()


def over_the_batch(rewards: np.ndarray, group_sizes: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """Normalised over all samples: it differs if a rank sees only its own."""
    return (rewards - rewards.mean()) / rewards.std() - truncated.mean() + len(group_sizes)


async def prepared_on(ranks: int, threads: Offload) -> tuple[dict[int, list[float]], dict[int, int], PreparedBatch]:
    """The advantages of each prompt, the trained tokens of each prompt, and what rank 0 has prepared."""
    rng = np.random.default_rng(5)
    bodies: dict[PayloadRef, bytes] = {}
    groups = []
    for prompt in range(7):
        refs = []
        for member in range(3):
            size = int(rng.integers(3, 12))
            arrays = {
                "token_ids": np.full(size, 100 * prompt + member, np.int32),
                "loss_mask": (np.arange(size) >= 2).astype(np.uint8),
                "logprobs": np.full(size, -1.0, np.float32),
                "truncated": np.array([rng.random() < 0.2], np.uint8),
                "unscored": np.array([rng.random() < 0.15], np.uint8),
            } | reward_part_arrays({"right": float(rng.random())})
            body = bytes(encode(arrays))
            refs.append(PayloadRef("ring", 0, 3 * prompt + member, 0, len(body), 0))
            bodies[refs[-1]] = body
        ids = tuple(SampleId(3 * prompt + member) for member in range(3))
        rewards = tuple(rng.random(3).tolist())
        groups.append(BatchGroup(PromptIndex(prompt), 0, ids, rewards, (Version(0),) * 3, (4, 5, 6), tuple(refs)))
    batch = Batch(StepIndex(4), tuple(groups))
    others = [Rank(bodies, {groups[3].payloads[1]}, threads) for _ in range(ranks)]
    own = others.pop(0)

    class Ranks:
        def fetch(self, batch: Batch, rings: Any) -> Any:
            mine, *shares = shares_of(batch, ranks)
            orders = zip(others, shares, strict=True)
            return mine, [asyncio.ensure_future(rank.answer(Fetch(share, rings))) for rank, share in orders]

        def pack(self, step: StepIndex, advantages: Any) -> Any:
            orders = zip(others, advantages, strict=True)
            return [asyncio.ensure_future(rank.answer(Pack(step, tuple(one.tolist())))) for rank, one in orders]

    class Controller:
        pipeline = "p"

        async def call(self, request: Any) -> BatchReady:
            return BatchReady(batch, ())

    process: Any = SimpleNamespace(stop=SimpleNamespace(requested=False), member="t")
    prepared = await DataLoader(process, Controller(), own.loader, Ranks()).prepare(StepIndex(4))  # type: ignore[arg-type]
    assert prepared is not None
    advantages: dict[int, list[float]] = {}
    tokens: dict[int, int] = {}
    for part in [prepared, *(one for rank in others for one in rank.packed)]:
        for micro_batch in part.micro_batches:
            assert isinstance(micro_batch, TokenMicroBatch)
            for row, sequence in enumerate(micro_batch.token_ids_RT[:, 0].tolist()):
                advantages.setdefault(sequence, []).append(float(micro_batch.advantages_N[row]))
                tokens[sequence] = int(micro_batch.trained_tokens_N[row])
    return advantages, tokens, prepared


@pytest.mark.parametrize("ranks", [2, 3, 9])
async def test_advantages_and_figures_are_those_of_the_whole_batch(ranks: int):
    threads = Offload(2 * ranks, "test")  # two for each
    try:
        wanted, wanted_tokens, alone = await prepared_on(1, threads)
        found, tokens, prepared = await prepared_on(ranks, threads)
    finally:
        threads.close(timeout_s=2.0)
    assert len(wanted) == 18
    assert found == wanted
    assert tokens == wanted_tokens
    assert 0 in tokens.values()
    assert prepared.figures == alone.figures
    assert prepared.missing_prompts == alone.missing_prompts == (3,)
    assert prepared.missing_reason == alone.missing_reason != ""
