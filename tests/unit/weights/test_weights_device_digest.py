"""The digest that is computed on the device, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError
from penstock.records.weights import TensorSpec
from penstock.weights.io import device_digest as module
from penstock.weights.io.device import placement, views
from penstock.weights.io.device_digest import device_digest, scattered_digest
from profiles import examples

SPECS = (
    TensorSpec("a.odd", "uint8", (13,)),
    TensorSpec("b.big", "float32", (700, 211)),
    TensorSpec("c.half", "bfloat16", (333,)),
    TensorSpec("d.none", "float32", (0,)),
    TensorSpec("e.scalar", "float32", ()),
)


def flat(seed: int = 0) -> torch.Tensor:
    """A slot with a version in it."""
    generator = torch.Generator().manual_seed(seed)
    slot = torch.zeros(placement(SPECS)[1], dtype=torch.uint8)
    for tensor in views(slot, SPECS).values():
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
    return slot


def test_a_slot_holds_every_tensor_where_it_belongs() -> None:
    slot = flat()
    found = views(slot, SPECS)
    offsets, size = placement(SPECS)
    assert size == slot.numel()
    for spec in SPECS:
        assert tuple(found[spec.name].shape) == spec.shape
        assert str(found[spec.name].dtype) == f"torch.{spec.dtype}"
        if found[spec.name].numel():
            assert found[spec.name].data_ptr() == slot.data_ptr() + offsets[spec.name]


def test_equal_weights_have_equal_digests_and_others_have_others() -> None:
    assert device_digest(flat(), SPECS) == device_digest(flat(), SPECS)
    assert device_digest(flat(), SPECS) != device_digest(flat(1), SPECS)
    assert device_digest(torch.zeros(0, dtype=torch.uint8), ()) == device_digest(torch.zeros(0, dtype=torch.uint8), ())


def test_names_dtypes_and_shapes_count() -> None:
    slot = torch.zeros(256, dtype=torch.uint8)
    kinds = [("a", "float32", (4, 6)), ("b", "float32", (4, 6)), ("a", "float32", (6, 4)), ("a", "int32", (4, 6))]
    assert len({device_digest(slot, (TensorSpec(*kind),)) for kind in kinds}) == 4


def test_how_much_is_summed_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = device_digest(flat(), SPECS)
    monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    assert device_digest(flat(), SPECS) == whole


def test_memory_that_is_not_whole_words_is_refused() -> None:
    for memory in (torch.zeros(13, dtype=torch.uint8), torch.zeros(64), torch.zeros(72, dtype=torch.uint8)[3:67]):
        with pytest.raises(LocalProtocolError, match="whole words"):
            device_digest(memory, ())


@settings(max_examples=examples(60), deadline=None)
@given(where=st.integers(0, 10**7), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(where: int, bit: int) -> None:
    damaged = flat()
    damaged[where % damaged.numel()] ^= 1 << bit
    assert device_digest(damaged, SPECS) != device_digest(flat(), SPECS)


@settings(max_examples=examples(60), deadline=None)
@given(first=st.integers(0, 18_000), second=st.integers(0, 18_000))
def test_exchanged_words_are_noticed(first: int, second: int) -> None:
    slot = torch.arange(18_001, dtype=torch.int64).view(torch.uint8)
    words = slot.clone().view(torch.int64)
    words[first], words[second] = second, first
    assert (device_digest(words.view(torch.uint8), ()) == device_digest(slot, ())) == (first == second)


def scattered(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """The same tensors, each in memory of its own, and one that begins within a word."""
    return [(name, tensor.clone()) for name, tensor in views(flat(seed), SPECS).items()] + [
        ("f.misaligned", torch.arange(40, dtype=torch.uint8)[3:])
    ]


def test_tensors_anywhere_have_one_digest_and_every_changed_byte_another() -> None:
    whole = scattered_digest(scattered())
    assert scattered_digest(scattered()) == whole
    assert scattered_digest(scattered(1)) != whole
    assert scattered_digest(scattered()[:-1]) != whole
    for at, (_, tensor) in enumerate(scattered()):
        for position in {0, tensor.numel() - 1} if tensor.numel() else ():
            damaged = scattered()
            damaged[at][1].view(-1)[position] += 1
            assert scattered_digest(damaged) != whole
    renamed = [("other" if at == 0 else name, tensor) for at, (name, tensor) in enumerate(scattered())]
    assert scattered_digest(renamed) != whole
