"""Whatever arrays go in come out; whatever bytes come in, the decoder answers with arrays or one kind of error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from penstock.batch import codec
from penstock.errors import RemoteProtocolError
from profiles import examples

arrays = st.dictionaries(
    st.text(st.characters(codec="ascii"), min_size=1, max_size=12),
    st.sampled_from(sorted(codec.DTYPES.values())).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    ),
    max_size=6,
)


@settings(max_examples=examples(200), deadline=None)
@given(arrays)
def test_round_trip(sample: dict[str, np.ndarray]) -> None:
    decoded = codec.decode(bytes(codec.encode(sample)))
    assert list(decoded) == list(sample)
    for name, array in sample.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].shape == array.shape
        assert decoded[name].tobytes() == array.tobytes()


@settings(max_examples=examples(100), deadline=None)
@given(arrays, st.data())
def test_chunks_are_written_like_the_array_they_are(sample: dict[str, np.ndarray], data: st.DataObject) -> None:
    cut: dict[str, np.ndarray | list[np.ndarray]] = {}
    for name, array in sample.items():
        cuts = st.lists(st.integers(0, len(array)), max_size=4) if array.ndim else None
        cut[name] = array if cuts is None else np.split(array, sorted(data.draw(cuts)))
    whole, stride = bytes(codec.encode(sample)), data.draw(st.integers(1, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "STRIDE_BYTES", stride)
        encoded = codec.encode(cut)
        written = bytearray(b"\xff" * encoded.size_bytes)
        progress = [(end, bytes(written[:end])) for end in encoded.fill(written)]
    assert bytes(written) == whole
    assert [end for end, _ in progress] == sorted(end for end, _ in progress)
    assert all(whole.startswith(so_far) for _, so_far in progress), "what is said to be in place is in place"
    assert progress[-1][0] == encoded.size_bytes


@settings(max_examples=examples(300), deadline=None)
@given(arrays, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.integers(-40, 8))
def test_damaged_samples_never_escape_the_buffer(
    sample: dict[str, np.ndarray], writes: list[tuple[int, int]], resize: int
) -> None:
    buffer = bytearray(bytes(codec.encode(sample)))
    for position, byte in writes:
        buffer[position % len(buffer)] = byte
    buffer = buffer[:resize] if resize < 0 else buffer + bytes(resize)
    check(bytes(buffer))


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused_or_decoded_within_bounds(noise: bytes, with_magic: bool) -> None:
    check((codec.MAGIC + b"\x01\0" if with_magic else b"") + noise)


def check(buffer: bytes) -> None:
    try:
        decoded = codec.decode(buffer)
    except RemoteProtocolError:
        return
    assert sum(array.nbytes for array in decoded.values()) <= len(buffer)
    for array in decoded.values():
        array.tobytes()
        assert not array.flags.writeable
