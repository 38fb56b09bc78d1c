"""What processes need of a cluster, where they may be, and what is said when there is no place."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.load import validate
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.launch.placing import Needs, Node, check_pool, groups_of, listens_outside, shortage, usable_nodes

HEAD = Node("a", "10.0.0.1", cpus=8, gpus=0)
GPUS = Node("b", "10.0.0.2", cpus=8, gpus=4, sees_directory=False)


def config(*, rollout: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **extra: Any) -> Config:
    pipeline = {"name": "letters", "steps": 5, "env": {"name": "copy"}, "model": {"kind": "tiny"}}
    parts = {"rollout": rollout or {}, "train": train or {}} | extra.pop("pipeline", {})
    return validate({"pipeline": [pipeline | parts], **extra})


def needs(config: Config, *, with_gpus: bool = False) -> dict[str, Needs]:
    return {group.name: group.needs for group in groups_of(config, with_gpus=with_gpus)}


def test_workers_are_spread_together_and_everyone_else_is_placed_alone():
    groups = groups_of(config(rollout={"workers": 3}), with_gpus=False)
    assert [(group.name, group.strategy, len(group.members)) for group in groups] == [
        ("controller", "PACK", 1),
        ("letters.trainer", "PACK", 1),
        ("letters.rollout", "SPREAD", 3),
    ]


def test_threads_ranks_and_preparation_processes_are_asked_for():
    asked = needs(config(rollout={"threads": 2, "ranks": 2, "batch_samples": 64, "preparation_processes": 3}))
    assert asked["letters.rollout"] == Needs(cpus=7)
    assert asked["letters.trainer"] == Needs(cpus=1, directory=True)


@pytest.mark.parametrize(
    ("device", "with_gpus", "gpus"),
    [("auto", False, 0), ("auto", True, 1), ("cuda", False, 1), ("cpu", True, 0)],
)
def test_gpus_are_asked_for_where_they_are_meant(device: str, with_gpus: bool, gpus: int):
    asked = needs(config(rollout={"device": device}, train={"device": device}), with_gpus=with_gpus)
    assert asked["letters.trainer"].gpus == asked["letters.rollout"].gpus == gpus


def test_a_worker_with_ranks_gets_a_gpu_for_each():
    asked = needs(config(rollout={"ranks": 2, "batch_samples": 64}), with_gpus=True)
    assert asked["letters.rollout"].gpus == 2


def test_the_ranks_of_a_trainer_are_one_place():
    made = config(train={"ranks": 4, "threads": 2})
    (group,) = (one for one in groups_of(made, with_gpus=True) if one.name == "letters.trainer")
    assert (group.members, group.needs) == (("letters.trainer",), Needs(cpus=8, gpus=4, directory=True))


def test_a_gpu_by_number_is_refused_since_ray_chooses():
    with pytest.raises(ConfigError, match=r"pipeline\.letters\.train\.device = 'cuda:1'.*use 'cuda' or 'auto'"):
        needs(config(train={"device": "cuda:1"}))


def test_a_pool_of_gpus_is_refused_and_a_pool_of_cpu_slots_is_not():
    shared = config(pool={"devices": 2})
    check_pool(shared, groups_of(shared, with_gpus=False))
    with pytest.raises(ConfigError, match=r"pool\.devices = 2 shares GPUs"):
        check_pool(shared, groups_of(shared, with_gpus=True))


def test_a_process_that_needs_the_run_directory_stays_where_it_is_seen():
    by_network, by_files = config(), config(pipeline={"weights": {"transport": "files"}})
    homes = {group.name: usable_nodes(group, [HEAD, GPUS]) for group in groups_of(by_network, with_gpus=False)}
    assert homes == {"controller": [HEAD], "letters.trainer": [HEAD], "letters.rollout": [HEAD, GPUS]}
    assert all(usable_nodes(group, [HEAD, GPUS]) == [HEAD] for group in groups_of(by_files, with_gpus=False))


def test_nodes_in_trouble_hold_nothing():
    sick = Node("c", "10.0.0.3", cpus=8, gpus=0, trouble="it has Penstock 0.0.1")
    assert all(usable_nodes(group, [sick]) == [] for group in groups_of(config(), with_gpus=False))


def test_the_network_is_listened_to_only_when_nodes_are_several_machines():
    assert not listens_outside([HEAD, Node("d", HEAD.address, cpus=1, gpus=0)])
    assert listens_outside([HEAD, GPUS])
    assert not listens_outside([HEAD, Node("e", "10.0.0.9", cpus=1, gpus=0, trouble="silent")])


@pytest.mark.parametrize(
    ("nodes", "advice"),
    [
        ([HEAD], "wait for other work to end"),
        ([Node("a", "10.0.0.1", cpus=1, gpus=0)], "add a node that is large enough"),
        ([GPUS], "put run.dir on a file system that the nodes share"),
    ],
)
def test_a_shortage_names_what_was_asked_what_there_is_and_what_to_do(nodes: list[Node], advice: str):
    trainer = groups_of(config(train={"threads": 4}), with_gpus=False)[1]
    sentence = shortage([trainer], nodes, {"CPU": 0.5}, waited_s=30)
    assert "no place within 30 s for 1 x letters.trainer of 4 CPUs with access to the run directory" in sentence
    assert f"{nodes[0].address} with {nodes[0].cpus:g} CPU" in sentence
    assert "free: 0.5 CPUs" in sentence
    assert advice in sentence
