"""Encodes and decodes messages as msgpack; lengths are checked before decoding."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from penstock.errors import RemoteProtocolError
from penstock.records.section import Section

M = TypeVar("M")

DAMAGED = (msgspec.DecodeError, UnicodeDecodeError)
"""Errors that decoding raises for damaged bytes; the second for text that is not UTF-8."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Control messages carry scalars and references; anything larger is a mistake or an attack."""


def encode_section(value: Any) -> Any:
    """The `enc_hook` of encoders for structs that contain settings."""
    if isinstance(value, Section):
        return value.model_dump()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def decode_section(kind: type, value: Any) -> Any:
    """The `dec_hook` of decoders for structs that contain settings."""
    if issubclass(kind, Section):
        return kind.model_validate(value)
    raise NotImplementedError(f"{kind.__name__} cannot be decoded")


class Codec(Generic[M]):
    """Encodes and decodes one type (usually a tagged union) and refuses everything else."""

    def __init__(self, kind: type[M] | object, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)  # type: ignore[arg-type]
        self._max_bytes = max_bytes

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, body: bytes | bytearray | memoryview) -> M:
        if len(body) > self._max_bytes:
            raise RemoteProtocolError(f"message of {len(body)} bytes exceeds the limit of {self._max_bytes}")
        try:
            return self._decoder.decode(body)
        except (*DAMAGED, RecursionError) as error:
            raise RemoteProtocolError(f"malformed message of {len(body)} bytes: {error}") from error
