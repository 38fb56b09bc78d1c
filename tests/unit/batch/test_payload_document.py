"""The document of the payload format is drawn from the code's table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from penstock.batch import codec
from penstock.batch.pack import PackSettings, pack_tokens

DOCUMENT = (Path(__file__).parents[3] / "docs" / "protocols" / "payload.md").read_text()


def test_the_dtype_table_is_the_codecs() -> None:
    table = DOCUMENT.partition("<!-- dtypes -->")[2].partition("<!-- end -->")[0]
    rows = dict(re.findall(r"\| (\d+) \| (\w+) \|", table))
    assert rows == {str(code): str(np.dtype(text)) for code, text in codec.DTYPES.items()}


def test_the_limits_and_sizes_are_the_codecs() -> None:
    assert f"format version {codec.FORMAT_VERSION}" in DOCUMENT
    assert f"At most {codec.MAX_ARRAYS} arrays, {codec.MAX_DIMENSIONS} dimensions" in DOCUMENT
    assert f"names of 1 to {codec.MAX_NAME_BYTES} characters" in DOCUMENT
    assert f"to a multiple of {codec.ALIGNMENT_BYTES}" in DOCUMENT
    assert codec.MAGIC.decode() in DOCUMENT
    assert bytes(codec.encode({}))[:4] == codec.MAGIC
    assert f"preamble, {len(bytes(codec.encode({}))) - 8} bytes" in DOCUMENT  # padded from 24 to 32


def test_bytes_per_token_are_as_promised() -> None:
    tokens = 1000
    sample = {
        "token_ids": np.ones(tokens, np.int32),
        "loss_mask": np.zeros(tokens, np.uint8),
        "logprobs": np.zeros(tokens, np.float32),
    }
    (batch,) = pack_tokens([sample], np.zeros(1), PackSettings(layout="padded"))
    per_token = (batch.size_bytes - batch.advantages_N.nbytes - batch.trained_tokens_N.nbytes) / tokens
    assert f"costs {per_token:.0f} bytes\nper token" in DOCUMENT
