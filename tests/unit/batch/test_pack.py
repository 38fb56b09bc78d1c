from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.batch.pack import (
    Packing,
    PackSettings,
    TokenMicroBatch,
    TrajectoryBatch,
    pack,
    pack_tokens,
    plan_micro_batches,
)
from penstock.errors import RemoteProtocolError


def sequence(tokens: int, seed: int, routed: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    prompt = max(1, tokens // 2)
    sample = {
        "token_ids": rng.integers(1, 1000, tokens, dtype=np.int32),
        "loss_mask": np.r_[np.zeros(prompt), np.ones(tokens - prompt)].astype(np.uint8),
        "logprobs": -rng.random(tokens, dtype=np.float32),
        "versions": np.array([[prompt, 3]], np.int32),
    }
    if routed:
        sample["routed_experts"] = rng.integers(0, 255, (tokens, 3, 2), dtype=np.uint8)
    return sample


def unpack(batches: list[TokenMicroBatch]) -> list[tuple[bytes, bytes, bytes, bytes, float]]:
    found = []
    for batch in batches:
        for index in range(len(batch.advantages_N)):
            at = batch.sequences_RT == index
            assert np.array_equal(batch.position_ids_RT[at], np.arange(at.sum()))
            experts = batch.routed_experts_RTLK
            found.append(
                (
                    batch.token_ids_RT[at].tobytes(),
                    batch.loss_mask_RT[at].tobytes(),
                    batch.logprobs_RT[at].tobytes(),
                    b"" if experts is None else experts[at].tobytes(),
                    float(batch.advantages_N[index]),
                )
            )
    return sorted(found)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("routed", [False, True])
def test_every_token_lands_once_and_unchanged(layout: Packing, routed: bool) -> None:
    samples = [sequence(tokens, seed, routed) for seed, tokens in enumerate([3, 9, 14, 5, 16, 2, 7, 7, 12])]
    advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
    batches = pack_tokens(samples, advantages, PackSettings(micro_batch_tokens=64, layout=layout))
    wanted = sorted(
        (
            s["token_ids"].tobytes(),
            s["loss_mask"].tobytes(),
            s["logprobs"].tobytes(),
            s["routed_experts"].tobytes() if routed else b"",
            float(a),
        )
        for s, a in zip(samples, advantages, strict=True)
    )
    assert unpack(batches) == wanted
    for batch in batches:
        assert batch.token_ids_RT.size <= 64
        assert batch.trained_tokens_N.sum() == batch.loss_mask_RT.sum()
        assert (batch.segments_K3 is None) == (layout == "padded")
        padding = batch.sequences_RT < 0
        assert not batch.token_ids_RT[padding].any()
        assert not batch.loss_mask_RT[padding].any()


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    batches = pack_tokens(
        [sequence(100, 0), sequence(4, 1)], np.zeros(2), PackSettings(micro_batch_tokens=32, layout="padded")
    )
    assert [batch.token_ids_RT.shape for batch in batches] == [(1, 100), (1, 4)]


def test_micro_batches_are_mostly_tokens() -> None:
    rng = np.random.default_rng(4)
    widths = rng.integers(100, 4000, 256).tolist()
    batches = plan_micro_batches(widths, 16_384)
    area = sum(len(batch) * max(widths[i] for i in batch) for batch in batches)
    assert sorted(i for batch in batches for i in batch) == list(range(256))
    assert sum(widths) / area > 0.93


@pytest.mark.parametrize(
    "damage",
    [
        {"loss_mask": np.ones(6, np.uint8)},
        {"loss_mask": np.zeros(5, np.uint8)},
        {"logprobs": np.zeros(7, np.float32)},
        {"logprobs": np.full(6, np.nan, np.float32)},
        {"routed_experts": np.zeros((6, 1, 1), np.uint8)},
        {"routed_experts": np.zeros((1, 3, 2), np.uint8)},
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(damage: dict[str, np.ndarray]) -> None:
    for routed in (False, True):
        samples = [sequence(6, 0, routed), sequence(6, 1) | damage]
        with pytest.raises(RemoteProtocolError):
            pack_tokens(samples, np.zeros(2), PackSettings(layout="padded"))


def test_threads_may_share_the_filling() -> None:
    samples = [sequence(tokens, tokens, routed=True) for tokens in range(2, 40)]
    settings = PackSettings(micro_batch_tokens=100, layout="padded")
    with ThreadPoolExecutor(4) as pool:
        spread = pack_tokens(samples, np.zeros(len(samples)), settings, spread=pool.map)
    assert unpack(spread) == unpack(pack_tokens(samples, np.zeros(len(samples)), settings))


@pytest.mark.parametrize("routed", [False, True])
def test_memory_that_was_used_before_makes_no_difference(routed: bool) -> None:
    samples = [sequence(tokens, tokens, routed) for tokens in (3, 9, 14, 5, 16)]
    settings = PackSettings(micro_batch_tokens=40, layout="packed")
    asked: list[int] = []

    def dirty(size_bytes: int) -> np.ndarray:
        asked.append(size_bytes)
        return np.full(size_bytes + 100, 0xFF, np.uint8)

    wanted = pack_tokens(samples, np.arange(5), settings)
    found = pack_tokens(samples, np.arange(5), settings, allocate=dirty)
    assert len(asked) == len(found) == len(wanted)
    for mine, clean in zip(found, wanted, strict=True):
        for name in TokenMicroBatch.__slots__:
            assert np.array_equal(getattr(mine, name), getattr(clean, name)), name


def episode(steps: int) -> dict[str, np.ndarray]:
    return {
        "observations": np.full((steps, 4), steps, np.float32),
        "actions": np.zeros(steps, np.int64),
        "logprobs": np.zeros(steps, np.float32),
        "rewards": np.ones(steps, np.float32),
        "terminated": np.array([steps % 2], np.uint8),
        "last_observation": np.full(4, -steps, np.float32),
    }


def test_episodes_are_joined_end_to_end() -> None:
    (batch,) = pack([episode(3), episode(2)], np.zeros(2), PackSettings(layout="padded"))
    assert isinstance(batch, TrajectoryBatch)
    assert batch.observations_S[:, 0].tolist() == [3, 3, 3, 2, 2]
    assert batch.lengths_N.tolist() == [3, 2]
    assert batch.terminated_N.tolist() == [1, 0]
    assert batch.last_observations_N[:, 0].tolist() == [-3, -2]


def test_an_episode_with_missing_steps_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="episode 1"):
        pack([episode(3), episode(3) | {"rewards": np.ones(2, np.float32)}], np.zeros(2), PackSettings(layout="padded"))


def test_an_empty_batch_packs_to_nothing() -> None:
    assert pack([], np.zeros(0), PackSettings(layout="padded")) == []


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
def test_a_sample_without_tokens_is_refused_before_micro_batches_are_planned(layout: Packing) -> None:
    """The plan can never have a micro-batch for each sample: it was sought for ever."""
    empty = {name: array[:0] for name, array in sequence(4, 0).items() if name != "versions"}
    settings = PackSettings(micro_batch_tokens=64, layout=layout, micro_batches=3)
    with pytest.raises(RemoteProtocolError, match="sample 1 of the batch is inconsistent"):
        pack_tokens([sequence(4, 0), empty, empty], np.zeros(3, np.float32), settings)
