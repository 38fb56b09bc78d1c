from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.batch.columns import reward_part_arrays
from penstock.engines.tokenizer import CharacterTokenizer
from penstock.train.rollout_log import QUEUED_STEPS, RolloutLog, TrainedRollout

TOKENIZER = CharacterTokenizer("abc>")


def spoken(sample: int) -> TrainedRollout:
    first, second, third = (TOKENIZER.encode(text) for text in ("ab>", "ac", ">b"))
    arrays = {
        "token_ids": np.array([*first, *second, TOKENIZER.eos_id, *third], np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1, 1, 0, 1], np.uint8),
        "routed_experts": np.zeros((8, 2, 2), np.uint8),
        "truncated": np.array([1], np.uint8),
        **reward_part_arrays({"right": 0.5, "short": None}),
    }
    return TrainedRollout(7, sample, 3, 0.5, -0.25, arrays)


def played(sample: int) -> TrainedRollout:
    arrays = {
        "observations": np.zeros((3, 4), np.float32),
        "actions": np.array([0, 1, 1]),
        "rewards": np.ones(3, np.float32),
        "terminated": np.array([1], np.uint8),
    }
    return TrainedRollout(7, sample, 3, 3.0, 0.0, arrays)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_read_like_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "letters.jsonl"
    log = RolloutLog(path, decode=TOKENIZER.decode)
    log.offer(10, [spoken(40)])
    assert log.close(10.0)
    assert lines(path) == [
        {
            "step": 10,
            "prompt": 7,
            "sample": 40,
            "version": 3,
            "reward": 0.5,
            "advantage": -0.25,
            "truncated": True,
            "reward_parts": {"right": 0.5},
            "length": 4,
            "pieces": [
                {"by": "context", "text": "ab>"},
                {"by": "policy", "text": "ac"},
                {"by": "context", "text": ">"},
                {"by": "policy", "text": "b"},
            ],
        }
    ]


def test_episodes_are_written_without_their_observations(tmp_path: Path) -> None:
    path = tmp_path / "cartpole.jsonl"
    log = RolloutLog(path)
    log.offer(0, [played(1)])
    assert log.close(10.0)
    (line,) = lines(path)
    assert line["actions"] == [0, 1, 1]
    assert line["return"] == 3
    assert line["terminated"] is True
    assert "observations" not in line


def test_only_some_steps_and_some_samples_are_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RolloutLog(path, every_steps=2, samples_per_step=2)
    assert [log.writes(step) for step in range(3)] == [True, False, True]
    for step in range(3):
        log.offer(step, [spoken(sample) for sample in range(5)])
    assert log.close(10.0)
    assert [(line["step"], line["sample"]) for line in lines(path)] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert log.written == 4


def test_the_arrays_may_be_reused_after_the_offer(tmp_path: Path) -> None:
    gate = threading.Event()

    def decode(ids: object) -> str:
        gate.wait(10.0)
        return str(list(ids))  # type: ignore[call-overload]

    path = tmp_path / "log.jsonl"
    log = RolloutLog(path, decode=decode)
    rollout = spoken(0)
    wanted = str(rollout.arrays["token_ids"][:3].tolist())
    log.offer(0, [rollout])
    rollout.arrays["token_ids"][:] = 0
    gate.set()
    assert log.close(10.0)
    assert lines(path)[0]["pieces"][0]["text"] == wanted


def test_a_slow_disk_drops_and_counts_and_never_blocks(tmp_path: Path) -> None:
    gate = threading.Event()

    def decode(ids: object) -> str:
        gate.wait(10.0)
        return ""

    log = RolloutLog(tmp_path / "log.jsonl", decode=decode, samples_per_step=1)
    offered = QUEUED_STEPS + 5
    for number in range(offered):
        log.offer(10 * number, [spoken(number)])
    assert log.dropped >= 4
    gate.set()
    assert log.close(10.0)
    assert log.written + log.dropped == offered


def test_a_disk_that_refuses_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        log = RolloutLog(tmp_path / "file" / "log.jsonl")
        log.close(10.0)
    assert "training continues" in caplog.text
    assert not log.writes(0)
    log.offer(0, [spoken(0)])
