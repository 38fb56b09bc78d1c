from typing import Any

from penstock.config.devices import devices_of
from penstock.config.load import validate


def config(pool: int, *pipelines: dict[str, Any]):
    tables = [
        {"name": f"p{number}", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}, **pipeline}
        for number, pipeline in enumerate(pipelines)
    ]
    return validate({"pool": {"devices": pool}, "pipeline": tables})


def test_without_a_pool_every_process_has_a_device_of_its_own():
    devices = devices_of(config(0, {"rollout": {"workers": 2}}, {"rollout": {"devices_per_worker": 2}}))
    used = [device for one in devices.placements.values() for device in (*one.train, *one.rollout)]
    assert sorted(used) == list(range(devices.count)) == list(range(6))
    assert not any(one.train_is_shared for one in devices.placements.values())


def test_training_devices_are_shared_as_soon_as_anybody_else_may_use_them():
    everywhere = [0, 1, 2, 3]
    devices = devices_of(
        config(
            4,
            {"train_devices": [0, 1], "rollout_devices": everywhere},
            {"train_devices": [2, 3], "rollout_devices": everywhere},
        )
    )
    assert all(one.train_is_shared for one in devices.placements.values())


def test_devices_that_no_other_pipeline_uses_are_kept():
    devices = devices_of(
        config(
            4,
            {"train_devices": [0], "rollout_devices": [1]},
            {"train_devices": [2], "rollout_devices": [3]},
        )
    )
    assert not any(one.train_is_shared for one in devices.placements.values())


def test_a_pipeline_that_names_none_may_generate_anywhere():
    devices = devices_of(config(3, {}))
    assert devices.placements["p0"].rollout == (0, 1, 2)
    assert devices.placements["p0"].train_is_shared
