from __future__ import annotations

import struct

import numpy as np
import pytest

from penstock.batch import codec
from penstock.errors import LocalProtocolError, RemoteProtocolError


def sample() -> dict[str, np.ndarray]:
    return {
        "token_ids": np.arange(7, dtype=np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1, 1, 1], np.uint8),
        "logprobs": np.linspace(-1, 0, 7, dtype=np.float32),
        "versions": np.array([[3, 12], [5, 13]], np.int32),
        "routed_experts": np.arange(7 * 2 * 3, dtype=np.uint8).reshape(7, 2, 3),
    }


def joined(arrays: dict[str, np.ndarray]) -> bytes:
    return bytes(codec.encode(arrays))


def test_round_trip_keeps_order_dtypes_shapes_and_bytes() -> None:
    arrays = sample() | {"empty": np.zeros((0, 4), np.float32), "scalar": np.array(2.5), "half": np.ones(3, np.float16)}
    decoded = codec.decode(joined(arrays))
    assert list(decoded) == list(arrays)
    for name, array in arrays.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].shape == array.shape
        assert decoded[name].tobytes() == array.tobytes()


def test_encoding_copies_nothing_before_it_is_written() -> None:
    token_ids = np.zeros(100, np.int32)
    encoded = codec.encode({"token_ids": token_ids})
    token_ids[5] = 77
    assert codec.decode(bytes(encoded))["token_ids"][5] == 77


def test_decoding_is_a_read_only_view_that_keeps_the_buffer_alive() -> None:
    buffer = bytearray(joined(sample()))
    decoded = codec.decode(buffer)
    assert not any(array.flags.writeable for array in decoded.values())
    at = bytes(buffer).index(np.arange(7, dtype=np.int32).tobytes())
    buffer[at : at + 4] = struct.pack("<i", 41)
    assert decoded["token_ids"][0] == 41


def test_every_array_starts_aligned() -> None:
    buffer = joined({"a": np.ones(3, np.uint8), "b": np.ones(5, np.float64), "c": np.ones(1, np.uint16)})
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    for array in codec.decode(buffer).values():
        assert (array.ctypes.data - start) % codec.ALIGNMENT_BYTES == 0


def test_arrays_that_are_not_contiguous_are_encoded_by_value() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    decoded = codec.decode(joined({"columns": array[:, ::2], "fortran": np.asfortranarray(array)}))
    assert np.array_equal(decoded["columns"], array[:, ::2])
    assert np.array_equal(decoded["fortran"], array)


def test_chunks_are_joined_by_being_written() -> None:
    chunks = [np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.arange(10, dtype=np.int32)[::2]]
    assert codec.decode(bytes(codec.encode({"a": chunks})))["a"].tolist() == [0, 1, 2, 0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [np.zeros(2, np.int32), np.zeros(2, np.int64)],
        [np.zeros((2, 3), np.int32), np.zeros((2, 4), np.int32)],
        [np.array(1.0), np.array(2.0)],
    ],
)
def test_chunks_that_do_not_fit_together_are_refused(chunks: list[np.ndarray]) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be joined"):
        codec.encode({"a": chunks})


@pytest.mark.parametrize(
    "arrays",
    [
        {"mask": np.ones(3, bool)},
        {"big_endian": np.ones(3, ">i4")},
        {"objects": np.array([object()])},
        {"text": np.array(["a"])},
        {"": np.ones(1, np.uint8)},
        {"é": np.ones(1, np.uint8)},
        {"n" * 64: np.ones(1, np.uint8)},
        {"deep": np.ones((1,) * 9, np.uint8)},
        {str(i): np.ones(1, np.uint8) for i in range(65)},
    ],
)
def test_what_cannot_travel_is_refused_before_a_byte_is_written(arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(arrays)


@pytest.mark.parametrize("end", range(0, 288, 7))
def test_truncation_is_refused(end: int) -> None:
    whole = joined(sample())
    assert len(whole) > 280
    with pytest.raises(RemoteProtocolError):
        codec.decode(whole[:end])


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(joined(sample()) + b"\0" * 16)


def test_another_format_version_is_named() -> None:
    buffer = bytearray(joined(sample()))
    buffer[4:6] = struct.pack("<H", 9)
    with pytest.raises(RemoteProtocolError, match="format version 9"):
        codec.decode(buffer)


@pytest.mark.parametrize("extent", [8, 2**31, 2**63, 2**64 - 1])
def test_an_extent_larger_than_the_buffer_is_refused(extent: int) -> None:
    buffer = bytearray(joined({"token_ids": np.arange(4, dtype=np.int32)}))
    at = bytes(buffer).index(struct.pack("<Q", 4), 24)
    buffer[at : at + 8] = struct.pack("<Q", extent)
    with pytest.raises(RemoteProtocolError):
        codec.decode(buffer)


def test_an_empty_array_cannot_hide_a_huge_extent() -> None:
    buffer = bytearray(joined({"a": np.zeros((0, 5), np.int32)}))
    at = bytes(buffer).index(struct.pack("<Q", 5), 24)
    buffer[at : at + 8] = struct.pack("<Q", 2**40)
    with pytest.raises(RemoteProtocolError):
        codec.decode(buffer)


def test_a_repeated_name_is_refused() -> None:
    buffer = joined({"a": np.ones(4, np.int32), "b": np.ones(4, np.int32)}).replace(b"b", b"a", 1)
    with pytest.raises(RemoteProtocolError, match="repeated"):
        codec.decode(buffer)


def test_an_unknown_dtype_code_is_refused() -> None:
    buffer = bytearray(joined({"a": np.ones(4, np.int32)}))
    buffer[25] = 200
    with pytest.raises(RemoteProtocolError):
        codec.decode(buffer)


def test_codes_never_change() -> None:
    assert codec.DTYPES == {
        1: "|u1", 2: "|i1", 3: "<u2", 4: "<i2", 5: "<u4", 6: "<i4", 7: "<u8", 8: "<i8", 9: "<f2", 10: "<f4", 11: "<f8",
    }  # fmt: skip
