"""How a vLLM server verifies the weights in its memory, with a small model in place of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.engines.vllm.backend import MemoryCheck
from penstock.errors import RemoteProtocolError


class Worker(MemoryCheck):
    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 5)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)


def test_a_version_is_verified_while_the_memory_is_unchanged() -> None:
    worker = Worker()
    worker.penstock_loaded("one", "")
    worker.penstock_holds("one")
    with pytest.raises(RemoteProtocolError, match="does not hold version two"):
        worker.penstock_holds("two")
    worker.fill(2.0)
    with pytest.raises(RemoteProtocolError, match="does not hold version one"):
        worker.penstock_holds("one")
    worker.penstock_loaded("two", "one")
    worker.penstock_holds("two")


def test_a_load_that_changed_nothing_is_refused() -> None:
    worker = Worker()
    worker.penstock_loaded("one", "")
    with pytest.raises(RemoteProtocolError, match="still holds one"):
        worker.penstock_loaded("two", "one")
    worker.penstock_holds("one")


def test_a_version_that_is_loaded_again_must_be_what_it_was() -> None:
    worker = Worker()
    worker.penstock_loaded("one", "")
    worker.fill(2.0)
    with pytest.raises(RemoteProtocolError, match="differs from the first time"):
        worker.penstock_loaded("one", "")


def test_only_the_newest_versions_are_remembered() -> None:
    worker = Worker()
    last = 3 * MemoryCheck.PENSTOCK_KEPT
    for number in range(last + 1):
        worker.fill(float(number))
        worker.penstock_loaded(str(number), str(number - 1))
    assert len(worker.penstock_stored()) == MemoryCheck.PENSTOCK_KEPT
    worker.penstock_holds(str(last))
