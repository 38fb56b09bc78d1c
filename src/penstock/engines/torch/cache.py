"""The KV cache of the rows that are decoded together, in one tensor.

Every row begins at column 0; a mask hides the columns that it has not reached. A row joins in a free place and leaves
by freeing it: no other row moves, and no step copies the cache.

Shape suffixes: B rows of this forward, Q tokens read by it, C columns, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.engines.architecture import text_config
from penstock.errors import ConfigError, LocalProtocolError

COLUMNS_AT_ONCE = 64
"""Rows are widened in multiples of this, so that slowly growing lengths do not reallocate the cache each time."""


class RowCache:
    """At most `rows` rows, and rows times columns at most `tokens`. Raises ConfigError for an unsupported model.

    It implements only the cache method that the model's attention layers call: `update`. The caller passes masks and
    positions to the model.
    """

    is_compileable = False

    def __init__(self, model: nn.Module, rows: int, tokens: int) -> None:
        self._rows = rows
        self._tokens = tokens
        self._model = model
        self._layout = _layout_of(model)
        self._held: Tensor | None = None
        """[layers, keys and values, rows, C, H, D]"""
        self._write: tuple[Tensor, Tensor] | None = None
        self._read: slice | Tensor = slice(0)
        self._columns = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Allocated rows and columns."""
        return (0, 0) if self._held is None else (self._held.shape[2], self._held.shape[3])

    def holds(self, rows: int, columns: int) -> bool:
        """Whether this number of rows and columns is within the bound."""
        return rows * columns <= self._tokens

    def make_room(self, rows: int, columns: int, used_rows: int) -> bool:
        """Allocates this number of rows and columns; the first `used_rows` keep their content. True if it moved."""
        if not self.holds(rows, columns):
            raise LocalProtocolError(f"{rows} rows of {columns} tokens exceed the cache of {self._tokens} tokens")
        if rows <= self.shape[0] and columns <= self.shape[1]:
            return False
        columns = min(-(-columns // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE, self._tokens // rows)
        rows = max(rows, min(self._rows, self._tokens // columns))
        old, self._held = self._held, None
        if old is None or not used_rows:
            del old  # before the allocation: never two caches in memory
            self._held = self._empty(rows, columns)
            return True
        held = self._empty(rows, columns)
        common = min(columns, old.shape[3])
        held[:, :, :used_rows, :common] = old[:, :, :used_rows, :common]
        self._held = held
        return True

    def drop(self) -> None:
        """Frees the memory; the content of the rows is lost."""
        self._held = None
        self._write = None

    def save(self, row: int, columns: int) -> Tensor:
        """A copy of the first columns of a row."""
        return self._tensor()[:, :, row, :columns].clone()

    def load(self, row: int, saved: Tensor) -> None:
        """Writes the result of `save` into any row."""
        self._tensor()[:, :, row, : saved.shape[2]] = saved

    def copy(self, source: int, targets: list[int], columns: int) -> None:
        """Copies the first columns of one row into others."""
        held = self._tensor()
        for target in targets:
            held[:, :, target, :columns] = held[:, :, source, :columns]

    def set_target(self, rows: Tensor | int, positions_BQ: Tensor, columns: int) -> None:
        """Sets the rows that the next forward reads (a number: the first ones) up to `columns`, and where it writes.

        Negative positions are padding: they are written to the last column, which no row attends to before it has
        written it.
        """
        last = self.shape[1] - 1
        index_B = torch.arange(rows, device=positions_BQ.device) if isinstance(rows, int) else rows
        self._write = (index_B[:, None], torch.where(positions_BQ < 0, last, positions_BQ))
        self._read = slice(rows) if isinstance(rows, int) else rows
        self._columns = columns

    def update(self, keys_BHQD: Tensor, values_BHQD: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the model in every layer: stores the new keys and values, returns all of the rows."""
        assert self._write is not None
        keys, values = self._tensor()[layer]
        keys[self._write] = keys_BHQD.transpose(1, 2)
        values[self._write] = values_BHQD.transpose(1, 2)
        return (
            keys[self._read, : self._columns].transpose(1, 2),
            values[self._read, : self._columns].transpose(1, 2),
        )

    def get_seq_length(self, layer: int = 0) -> int:
        """Used only by models without explicit positions; here they are always passed."""
        return 0

    def _tensor(self) -> Tensor:
        assert self._held is not None
        return self._held

    def _empty(self, rows: int, columns: int) -> Tensor:
        layers, heads, width, dtype = self._layout
        device = next(self._model.parameters()).device
        # Zeros: a masked column has weight 0, and 0 times uninitialised memory may be nan.
        return torch.zeros((layers, 2, rows, columns, heads, width), dtype=dtype, device=device)


def window_of(model: nn.Module) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window, if any, and the kinds of attention layers."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
    if not kinds:
        kinds = ("sliding_attention",) if window else ("full_attention",)
    return window, kinds


def _layout_of(model: nn.Module) -> tuple[int, int, int, torch.dtype]:
    """Layers, heads, width and type of the model's keys and values, from a forward of one token."""
    from transformers import DynamicCache

    name, (_, kinds) = type(model).__name__, window_of(model)
    if other := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"the torch engine serves models whose layers all attend to tokens; this {name} has layers of other kinds: "
            f"{', '.join(other)}; serve it with vLLM"
        )
    cache: Any = DynamicCache()
    ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as error:  # of the model's code
        raise ConfigError(
            f"the torch engine serves models with a cache of keys and values; this {name} needs another one "
            f"({type(error).__name__}: {error}); serve it with vLLM"
        ) from error
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    shapes = {tuple(tensor.shape) for layer in held for tensor in (layer.keys, layer.values)}
    layers = getattr(text_config(model), "num_hidden_layers", len(held))
    if not held or len(held) != layers:
        raise ConfigError(
            f"the torch engine serves models whose layers all attend to tokens; this {name} has {layers} layers and "
            f"caches keys and values of {len(held)}; serve it with vLLM"
        )
    if len(shapes) > 1:
        raise ConfigError(
            f"the torch engine serves models with keys and values of one shape; those of this {name} have several: "
            f"{', '.join(str(shape[1::2]) for shape in sorted(shapes))} (heads, width); serve it with vLLM"
        )
    _, heads, _, width = held[0].keys.shape
    return layers, heads, width, held[0].keys.dtype
