"""How a batch is shared out between the ranks of a trainer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidTransition
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.train.data import DataLoader
from penstock.train.rank_calls import Prepared
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
        def prepare(self, batch: Batch, rings: Any) -> Any:
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(Prepared(tuple(other), missing, "stale"))
            return batch, [answer]

    class Loader:
        async def load(self, share: Batch, rings: Any) -> Any:
            return SimpleNamespace(prompts=tuple(own), missing_prompts=(), missing_reason="", figures={})

    process: Any = SimpleNamespace(stop=SimpleNamespace(requested=False), member="t")
    loader = DataLoader(process, Controller(), Loader(), Ranks())  # type: ignore[arg-type]
    if fault in ("none", "a payload is missing"):
        prepared = await loader.prepare(StepIndex(0))
        assert prepared is not None
        assert prepared.missing_prompts == missing
    else:
        with pytest.raises(InvalidTransition, match=r"step 0 has prompts \[0, 1, 2, 3, 4\], but its ranks prepared"):
            await loader.prepare(StepIndex(0))
