"""The digest that is computed on the device, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.weights.io import device_digest as module
from penstock.weights.io.device_digest import device_digest


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.odd": torch.randint(0, 255, (13,), dtype=torch.uint8, generator=generator),
        "b.big": torch.randn(700, 211, generator=generator),
        "c.half": torch.randn(333, generator=generator).to(torch.bfloat16),
        "d.none": torch.zeros(0),
        "e.scalar": torch.tensor(3.0),
    }


def test_equal_weights_have_equal_digests_and_others_have_others() -> None:
    assert device_digest(tensors()) == device_digest(tensors())
    assert device_digest(tensors()) != device_digest(tensors(1))
    assert device_digest({}) == device_digest({})


@pytest.mark.parametrize("block_words", [1 << 10, 1 << 12, 1 << 23])
def test_how_the_work_is_cut_does_not_matter(monkeypatch: pytest.MonkeyPatch, block_words: int) -> None:
    monkeypatch.setattr(module, "ROW_WORDS", 1 << 10)
    module._constants.cache_clear()
    whole = device_digest(tensors())
    monkeypatch.setattr(module, "BLOCK_WORDS", block_words)
    assert device_digest(tensors()) == whole
    module._constants.cache_clear()


def test_names_dtypes_and_shapes_count() -> None:
    base = {"a": torch.zeros(4, 6)}
    others = [{"b": torch.zeros(4, 6)}, {"a": torch.zeros(6, 4)}, {"a": torch.zeros(4, 6, dtype=torch.int32)}]
    assert len({device_digest(one) for one in [base, *others]}) == 4


def test_a_tensor_that_does_not_begin_on_a_word_is_read_all_the_same() -> None:
    memory = torch.arange(65, dtype=torch.uint8)
    assert device_digest({"a": memory[1:]}) == device_digest({"a": memory[1:].clone()})


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["a.odd", "b.big", "c.half", "e.scalar"]), where=st.integers(0, 10**6), bit=st.integers(0, 7)
)
def test_every_flipped_bit_is_noticed(name: str, where: int, bit: int) -> None:
    damaged = tensors()
    flat = damaged[name].view(-1).view(torch.uint8)
    flat[where % flat.numel()] ^= 1 << bit
    assert device_digest(damaged) != device_digest(tensors())


def test_exchanged_words_and_exchanged_tensors_are_noticed() -> None:
    base = {"a": torch.arange(5000.0), "b": torch.arange(5000.0) + 1}
    exchanged = base["a"].clone()
    exchanged[:2], exchanged[2:4] = base["a"][2:4], base["a"][:2]
    assert device_digest({**base, "a": exchanged}) != device_digest(base)
    assert device_digest({"a": base["b"], "b": base["a"]}) != device_digest(base)
