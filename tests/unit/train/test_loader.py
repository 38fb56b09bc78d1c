"""From fetched samples to what is trained: rewards shaped by length, advantages within groups, tokens left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.batch.advantage import dr_grpo
from penstock.batch.codec import encode
from penstock.batch.pack import PackSettings, TokenMicroBatch
from penstock.payload.io.fetch import FetchReport
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.runtime.offload import Offload
from penstock.train.data import BatchLoader
from penstock.train.settings import TrainSection

PROMPT = 2


class Fetched:
    """A fetcher whose payloads are at hand."""

    def __init__(self, bodies: dict[PayloadRef, bytes]) -> None:
        self._bodies = bodies

    def fetch(self, references: Iterator[PayloadRef], rings: object) -> FetchReport:
        report = FetchReport()
        report.views = {ref: memoryview(self._bodies[ref]) for ref in references}
        return report


def body(generated: int, **flags: bool) -> bytes:
    size = PROMPT + generated
    arrays = {
        "token_ids": np.arange(size, dtype=np.int32),
        "loss_mask": (np.arange(size) >= PROMPT).astype(np.uint8),
        "logprobs": np.full(size, -1.0, np.float32),
    }
    return bytes(encode(arrays | {name: np.array([flag], np.uint8) for name, flag in flags.items()}))


@pytest.fixture
def threads() -> Iterator[Offload]:
    offload = Offload(2, "test")
    yield offload
    offload.close(timeout_s=2.0)


def loaded(threads: Offload, **train: Any) -> tuple[np.ndarray, TokenMicroBatch]:
    """One group: short and right; long and right; cut off at the limit of 10; not scored."""
    lengths, rewards = (2, 8, 10, 3), (1.0, 1.0, 0.5, 9.0)
    bodies = [body(2), body(8), body(10, truncated=True), body(3, unscored=True)]
    refs = tuple(PayloadRef("ring", 0, slot, 0, len(one), 0) for slot, one in enumerate(bodies))
    samples = tuple(SampleId(number) for number in range(4))
    group = BatchGroup(PromptIndex(0), 0, samples, rewards, (Version(0),) * 4, lengths, refs)
    fetcher: Any = Fetched(dict(zip(refs, bodies, strict=True)))
    loader = BatchLoader(
        fetcher, threads, dr_grpo, PackSettings(layout="padded"), TrainSection(**train), max_new_tokens=10
    )
    share = loader.fetch_share(Batch(StepIndex(0), (group,)), ())
    prepared = loader.pack_share(share, loader.advantages_of(share.groups, share.facts))
    (batch,) = prepared.micro_batches
    assert isinstance(batch, TokenMicroBatch)
    return prepared.advantages, batch


def trained_lengths(batch: TokenMicroBatch) -> list[int]:
    return sorted(batch.trained_tokens_N.tolist())


def test_a_sample_without_a_score_is_out_of_its_group_and_out_of_the_loss(threads: Offload) -> None:
    advantages, batch = loaded(threads)
    mean = 2.5 / 3
    assert advantages.tolist() == pytest.approx([1 - mean, 1 - mean, 0.5 - mean, 0])
    assert trained_lengths(batch) == [0, 2, 8, 10]


def test_a_truncated_completion_is_left_out_of_the_loss_and_counts_in_its_group(threads: Offload) -> None:
    advantages, batch = loaded(threads, truncated="mask")
    mean = 2.5 / 3
    assert advantages.tolist() == pytest.approx([1 - mean, 1 - mean, 0.5 - mean, 0])
    assert trained_lengths(batch) == [0, 0, 2, 8]


def test_rewards_fall_with_length_before_they_are_compared(threads: Offload) -> None:
    advantages, batch = loaded(threads, overlong_tokens=4, overlong_penalty=0.4)
    shaped = np.array([1.0, 1.0 - 0.2, 0.5 - 0.4])
    assert advantages.tolist() == pytest.approx([*(shaped - shaped.mean()), 0])
    assert trained_lengths(batch) == [0, 2, 8, 10]


def test_each_turn_has_the_whole_limit(threads: Offload) -> None:
    """Three turns of 4 tokens are further from the limit of 10 than one of 9."""
    masks = [[0, 1, 1, 1, 1] * 3, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    bodies = [
        bytes(
            encode(
                {
                    "token_ids": np.arange(len(mask), dtype=np.int32),
                    "loss_mask": np.array(mask, np.uint8),
                    "logprobs": np.full(len(mask), -1.0, np.float32),
                }
            )
        )
        for mask in masks
    ]
    refs = tuple(PayloadRef("ring", 0, slot, 0, len(one), 0) for slot, one in enumerate(bodies))
    group = BatchGroup(
        PromptIndex(0), 0, (SampleId(0), SampleId(1)), (1.0, 1.0), (Version(0), Version(0)), (12, 9), refs
    )
    fetcher: Any = Fetched(dict(zip(refs, bodies, strict=True)))
    train = TrainSection(overlong_tokens=4, overlong_penalty=1.0)
    loader = BatchLoader(fetcher, threads, dr_grpo, PackSettings(layout="padded"), train, max_new_tokens=10)
    share = loader.fetch_share(Batch(StepIndex(0), (group,)), ())
    assert loader.advantages_of(share.groups, share.facts).tolist() == pytest.approx([0.375, -0.375])
