from __future__ import annotations

import pytest

from penstock.config.devices import devices_of, weights_stay_on_device
from penstock.config.run import Config
from penstock.launch.placing import groups_of

TINY: dict[str, object] = {"kind": "tiny"}


def config(pool: int = 0, model: dict[str, object] = TINY, env: str = "copy", **pipeline: object) -> Config:
    table = {"name": "a", "steps": 1, "env": {"name": env}, "model": model, **pipeline}
    return Config.model_validate({"pool": {"devices": pool}, "pipeline": [table]})


def test_every_training_device_has_a_rank():
    made = config(pool=4, train_devices=[1, 3])
    assert made.pipeline[0].train_ranks == 2
    assert devices_of(made).placements["a"].train == (1, 3)


def test_ranks_without_named_devices_take_the_first_of_the_pool_or_one_each():
    assert devices_of(config(pool=4, train={"ranks": 2})).placements["a"].train == (0, 1)
    alone = config(train={"ranks": 3})
    placed = devices_of(alone)
    assert placed.placements["a"].train == (0, 1, 2)
    assert not set(placed.placements["a"].train) & set(placed.placements["a"].rollout)
    assert not weights_stay_on_device(alone, alone.pipeline[0], gpus=1), "no device holds a whole version"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool": 2, "train": {"ranks": 3}}, "trains on 3 ranks, one device each, but pool.devices is 2"),
        ({"pool": 4, "train": {"ranks": 2}, "train_devices": [0]}, "train.ranks = 2, but train_devices names 1"),
        ({"pool": 4, "train_devices": [1, 1]}, "names a device twice"),
        (
            {"train": {"ranks": 2}, "model": {"kind": "mlp"}, "env": "gymnasium"},
            "2 ranks train language models only",
        ),
        (
            {"optimizer": {"offload": True}, "model": {"kind": "mlp"}, "env": "gymnasium"},
            "optimizer.offload is for language models",
        ),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        config(**wrong)  # type: ignore[arg-type]


def test_ray_places_all_ranks_of_a_trainer_on_one_node():
    made = config(train={"ranks": 4, "threads": 2, "device": "cuda"}, rollout={"device": "cuda"})
    trainer = next(group for group in groups_of(made, with_gpus=True) if group.name == "a.trainer")
    assert (trainer.needs.cpus, trainer.needs.gpus, len(trainer.members)) == (8, 4, 1)
