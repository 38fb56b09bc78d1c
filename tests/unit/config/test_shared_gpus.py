"""Which GPUs the processes of a run have without a pool, and what follows where some have the same one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.devices import (
    SHARE_BESIDE_TRAINER,
    SHARE_OF_ENGINES,
    generates_on,
    memory_share,
    trains_on,
    weights_stay_on_device,
)
from penstock.config.load import validate
from penstock.config.run import Config
from penstock.launch.gpus import gpu_environment
from penstock.launch.processes import processes_of


def config(*pipelines: dict[str, Any], pool: int = 0, launch: str = "local") -> Config:
    tables = [
        {"name": f"p{number}", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}, **pipeline}
        for number, pipeline in enumerate(pipelines)
    ]
    return validate({"pool": {"devices": pool}, "launch": {"kind": launch}, "pipeline": tables})


@pytest.mark.parametrize(
    ("gpus", "settings", "share", "stay"),
    [
        (1, {}, SHARE_BESIDE_TRAINER, True),
        (1, {"rollout": {"workers": 2}}, SHARE_BESIDE_TRAINER / 2, True),
        (1, {"train": {"device": "cpu"}}, 1.0, False),
        (1, {"weights": {"transport": "files"}}, SHARE_BESIDE_TRAINER, False),
        (2, {}, 1.0, False),
        (2, {"rollout": {"workers": 3}}, SHARE_BESIDE_TRAINER, True),  # on 1, 0, 1
        (2, {"rollout": {"workers": 3}, "train": {"device": "cpu"}}, SHARE_OF_ENGINES / 2, False),
        (4, {"rollout": {"device": "cuda:0"}}, 1.0, False),
        (4, {"rollout": {"device": "cuda:0"}, "train": {"device": "cuda:0"}}, SHARE_BESIDE_TRAINER, True),
        (4, {"rollout": {"device": "cuda:1", "workers": 3}}, SHARE_OF_ENGINES / 3, False),
        (4, {"rollout": {"device": "cuda:1"}, "train": {"ranks": 4}}, SHARE_BESIDE_TRAINER, False),
    ],
)
def test_one_pipeline(gpus: int, settings: dict[str, Any], share: float, stay: bool) -> None:
    run = config(settings)
    assert memory_share(run, run.pipeline[0], gpus) == share
    assert weights_stay_on_device(run, run.pipeline[0], gpus) == stay


@pytest.mark.parametrize("given_out", [{"pool": 4}, {"launch": "ray"}])
def test_nothing_is_shared_where_gpus_are_given_out(given_out: dict[str, Any]) -> None:
    run = config({}, **given_out)
    assert memory_share(run, run.pipeline[0], 1) == 1.0
    assert not weights_stay_on_device(run, run.pipeline[0], 1)


def test_processes_take_gpus_in_turn() -> None:
    run = config({"train": {"ranks": 2}, "rollout": {"workers": 2}}, {"engine": {"kind": "vllm", "tensor_parallel": 2}})
    left, right = run.pipeline
    assert (trains_on(run, left, 8), generates_on(run, left, 8)) == ((0, 1), (2, 3))
    assert (trains_on(run, right, 8), generates_on(run, right, 8)) == ((4,), (5, 6))
    assert generates_on(run, left, 8, worker=1) == (3,)
    assert (trains_on(run, right, 4), generates_on(run, right, 4)) == ((0,), (1, 2)), "around where they are fewer"


def test_gpus_that_are_named_for_others_come_last() -> None:
    run = config({"train": {"device": "cuda:1"}, "rollout": {"workers": 2}}, {"rollout": {"device": "cuda:2"}})
    left, right = run.pipeline
    assert (trains_on(run, left, 5), generates_on(run, left, 5)) == ((1,), (0, 3))
    assert (trains_on(run, right, 5), generates_on(run, right, 5)) == ((4,), (2,))
    assert generates_on(config({"train": {"device": "cpu"}}), left, 2) == (0,), "a CPU takes no turn"
    ranks = config({"train": {"ranks": 2}, "rollout": {"device": "cuda:0"}})
    assert trains_on(ranks, ranks.pipeline[0], 2) == (1, 0), "never twice the same"


def test_each_process_sees_its_own() -> None:
    run = config({"train": {"ranks": 2}, "rollout": {"workers": 2}}, {"rollout": {"device": "cuda:1"}})
    gpus = ("7", "6", "5", "4")
    seen = {spec.name: gpu_environment(spec, run, gpus).get("CUDA_VISIBLE_DEVICES") for spec in processes_of(run)}
    assert seen == {
        "controller": None,
        "p0.trainer": "7,5",
        "p0.rollout.0": "4",
        "p0.rollout.1": "6",  # no other is left
        "p1.trainer": "7",
        "p1.rollout.0": None,  # the second of all
    }
    assert not any(gpu_environment(spec, run, ("0",)) for spec in processes_of(run)), "there is nothing to choose"
    pooled = config({}, pool=4)
    assert all("CUDA_VISIBLE_DEVICES" not in gpu_environment(spec, pooled, gpus) for spec in processes_of(pooled))
