"""One decode step for all rows: the model, the draw and the next input, without synchronisation with the host.

The input of a row is on the device: its last token, its position, its sampling parameters. A step reads them and
overwrites them with the next ones. On a GPU a step is captured once as a CUDA graph for each number of rows and
columns, and then replayed: the graph's memory, the weights and the cache keep their addresses. Rows join and leave
through changes to that state between two steps.

Shape suffixes: S places, B rows of this step, C columns, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engines.architecture import text_config
from penstock.engines.requests import Sampling
from penstock.engines.torch.cache import RowCache, window_of
from penstock.engines.torch.sampling import Kind, SamplingParams, draw

COLUMNS_MULTIPLE = 16
"""The cache is read in multiples of this number of columns, for which attention kernels are faster."""


Draw = Callable[[Tensor, SamplingParams, Kind, torch.Generator], tuple[Tensor, Tensor]]


class Output:
    """The draws of one launch: tokens and log-probabilities, in one small asynchronous copy to the host."""

    def __init__(self, packed_2B: Tensor) -> None:
        self._host = packed_2B
        if packed_2B.is_cuda:
            self._host = torch.empty(packed_2B.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(packed_2B, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._done = None

    def read(self) -> tuple[list[int], list[float]]:
        """Waits for the launch to end."""
        if self._done is not None:
            self._done.synchronize()
        return self._host[0].tolist(), self._host[1].view(torch.float32).tolist()


def _packed(tokens_B: Tensor, logprobs_B: Tensor) -> Tensor:
    return torch.stack([tokens_B.int(), logprobs_B.view(torch.int32)])


class Decoding:
    """The state of all places, and the steps. Runs in the engine's thread, inside a step of `Serving`."""

    def __init__(self, model: Any, cache: RowCache, *, graphs: bool, draw: Draw = draw) -> None:
        """`graphs`: capture steps on a GPU, instead of launching them kernel by kernel."""
        self._model = model
        self._cache = cache
        self._draw = draw
        self._use_graphs = graphs
        self._mask_dtype = next(model.parameters()).dtype
        self._window, self._layer_kinds = window_of(model)
        self._max_positions: int = getattr(text_config(model), "max_position_embeddings", None) or sys.maxsize
        self._graphs: dict[tuple[int, int, Kind], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._ids_S = self._positions_S = torch.empty(0, dtype=torch.long)
        self._params: SamplingParams | None = None

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def allocate(self) -> None:
        """Allocates the state for the present cache; the first places keep their content. Drops all graphs."""
        self._drop_graphs()
        places, device = self._cache.shape[0], next(self._model.parameters()).device
        ids_S, positions_S, params = self._ids_S, self._positions_S, self._params
        self._ids_S = torch.zeros(places, dtype=torch.long, device=device)
        self._positions_S = torch.full((places,), self._cache.shape[1] - 1, dtype=torch.long, device=device)
        self._params = SamplingParams(places, device)
        if params is not None and ids_S.device == device:
            kept = min(places, len(ids_S))
            self._ids_S[:kept] = ids_S[:kept]
            self._positions_S[:kept] = positions_S[:kept].clamp(max=self._cache.shape[1] - 1)
            self._params.keep(params, kept)

    def drop(self) -> None:
        """Frees the device memory."""
        self._drop_graphs()
        self._ids_S = self._positions_S = torch.empty(0, dtype=torch.long)
        self._params = None

    def park(self, place: int) -> None:
        """Moves the place to the last column: steps draw unused tokens there, until `enter`."""
        self._positions_S[place] = self._cache.shape[1] - 1

    def park_all(self) -> None:
        self._positions_S.fill_(self._cache.shape[1] - 1)

    def move(self, source: int, target: int) -> None:
        assert self._params is not None
        self._ids_S[target] = self._ids_S[source]
        self._positions_S[target] = self._positions_S[source]
        self._params.move(source, target)

    def read(self, places: Sequence[int], ids_BQ: Any, positions_BQ: Any, columns: int) -> Tensor:
        """Prefills these places; returns the logits after the last token of each. Positions are left-padded with -1."""
        device = self._positions_S.device
        positions = torch.from_numpy(positions_BQ).to(device)
        self._cache.set_target(torch.tensor(places).to(device), positions, self._width(columns))
        return self._forward(torch.from_numpy(ids_BQ).to(device), positions.clamp(min=0), self._width(columns))

    def enter(
        self,
        places: Sequence[int],
        positions: Sequence[int],
        samplings: Sequence[Sampling],
        kind: Kind,
        logits_BV: Tensor,
        generator: torch.Generator,
    ) -> Output:
        """Draws the first token of prefilled rows, which decode from the next step on."""
        assert self._params is not None
        index_B = torch.tensor(places).to(logits_BV.device)
        self._params.put(index_B, samplings)
        tokens_B, logprobs_B = self._draw(logits_BV, self._params.at(index_B), kind, generator)
        self._ids_S[index_B] = tokens_B
        self._positions_S[index_B] = torch.tensor(positions).to(logits_BV.device)
        return Output(_packed(tokens_B, logprobs_B))

    def step(self, rows: int, columns: int, kind: Kind, generator: torch.Generator) -> Output:
        """One token for each of the first `rows` places; rows that decode are shorter than `columns`."""
        columns = self._width(columns)
        if not (self._ids_S.is_cuda and self._use_graphs):
            return Output(self._step(rows, columns, kind, generator))
        key = (rows, columns, kind)
        captured = self._graphs.get(key)
        if captured is None:
            output = Output(self._step(rows, columns, kind, generator))  # also the warm-up before the capture
            self._graphs[key] = self._capture(rows, columns, kind, generator)
            return output
        graph, packed_2B = captured
        graph.replay()
        return Output(packed_2B)

    def _capture(
        self, rows: int, columns: int, kind: Kind, generator: torch.Generator
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads may allocate during the capture: weights are staged at any time.
        # A stream of this device: the default one is on the device of the process's first capture.
        stream = torch.cuda.Stream(self._ids_S.device)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            packed_2B = self._step(rows, columns, kind, generator)
        return graph, packed_2B

    def _step(self, rows: int, columns: int, kind: Kind, generator: torch.Generator) -> Tensor:
        assert self._params is not None
        ids_B, positions_B = self._ids_S[:rows], self._positions_S[:rows]
        self._cache.set_target(rows, positions_B[:, None], columns)
        logits_BV = self._forward(ids_B[:, None], positions_B[:, None], columns)
        tokens_B, logprobs_B = self._draw(logits_BV, self._params.first(rows), kind, generator)
        ids_B.copy_(tokens_B)
        # A place without a row advances too: clamp it to the cache.
        positions_B.add_(1).clamp_(max=self._cache.shape[1] - 1)
        return _packed(tokens_B, logprobs_B)

    def _forward(self, ids_BQ: Tensor, positions_BQ: Tensor, columns: int) -> Tensor:
        # The model sees no position of a parked place: some positional encodings depend on the highest in the batch.
        positions_BQ = positions_BQ.clamp(max=min(columns, self._max_positions) - 1)
        columns_C = torch.arange(columns, device=ids_BQ.device)
        # Padding attends to column 0, since a softmax over no columns is nan.
        seen = columns_C <= positions_BQ[:, None, :, None]
        masks = {"full_attention": self._mask(seen)} if "full_attention" in self._layer_kinds else {}
        if "sliding_attention" in self._layer_kinds and self._window is not None:
            masks["sliding_attention"] = self._mask(seen & (columns_C > positions_BQ[:, None, :, None] - self._window))
        output = self._model(
            input_ids=ids_BQ,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions_BQ,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _mask(self, seen_B1QC: Tensor) -> Tensor:
        mask_B1QC = torch.zeros(seen_B1QC.shape, dtype=self._mask_dtype, device=seen_B1QC.device)
        return mask_B1QC.masked_fill_(~seen_B1QC, torch.finfo(self._mask_dtype).min)

    def _width(self, columns: int) -> int:
        """Rounded up: few widths on a GPU, since each is captured."""
        multiple = COLUMNS_MULTIPLE
        if self._ids_S.is_cuda:
            multiple = max(128, 1 << max(0, (columns - 1).bit_length() - 2))  # 128, 256, 384, 512, 768, 1024, 1536, ...
        return min(-(-columns // multiple) * multiple, self._cache.shape[1])

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None
