"""Which device of torch a process works on that was given devices of the pool."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.tensors import device_at


def device(pool: int, name: str, *devices: int, rank: int = 0) -> str:
    return str(device_at(name, devices, in_pool=bool(pool), rank=rank))


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_devices_of_a_pool_are_the_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device(4, name, 2, 3) == "cuda:2"
    assert device(4, name, 2, 3, rank=1) == "cuda:3"
    assert device(8, name, 6) == "cuda:2", "more slots than GPUs share them"


def test_without_a_pool_every_rank_takes_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device(0, "auto", 5, 6, 7, rank=rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_a_device_that_is_named_is_taken_and_without_a_gpu_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device(2, "cuda:0", 1) == "cuda:0"
    assert device(2, "cpu", 1) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device(2, "auto", 1) == "cpu"
