"""The engine on torch, on CPU and GPU: many completions in flight, decoded together by one thread.

Callers await on the event loop; the thread carries out the effects of the seating machine, step by step, and ends when
no request is in flight. Weights change between two of its steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from penstock.engines.architecture import text_config
from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.serving import Serving, ServingEngine
from penstock.engines.torch import seating
from penstock.engines.torch.cache import RowCache
from penstock.engines.torch.decoding import Decoding
from penstock.engines.torch.kernels import use_fewer_kernels
from penstock.engines.torch.rows import Row, Rows, SavedCache
from penstock.engines.torch.sampling import SamplingParams, draw, kind_of
from penstock.engines.torch.seating import Seating
from penstock.engines.torch.settings import TorchEngineSection
from penstock.engines.torch.shards import LeadingCache, LeadingDecoding, Shards
from penstock.errors import ConfigError, PeerLost


class _Request(msgspec.Struct, eq=False):
    row: Row
    waiter: asyncio.Future[Completion] | futures.Future[Completion]
    loop: asyncio.AbstractEventLoop | None
    """The event loop of the waiter; None if a thread waits."""


Result = tuple[_Request, Completion | PeerLost]


class TorchEngine(ServingEngine):
    """One causal language model in this process, on one device. Implements `RequestEngine`.

    At most `rows` completions are decoded together, and rows times the longest of them is at most `cache_tokens`; the
    others wait in order of arrival. Between turns at most `kept_tokens` tokens of conversations stay cached; an evicted
    one is prefilled again. With `reread` the whole context of a token is computed with the weights that drew it. An
    error in the thread fails all requests, in flight and later, with that error.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TorchEngineSection = TorchEngineSection(),
        *,
        pad_id: int,
        shards: Shards | None = None,
        version: int = 0,
        digest: str = "",
        seed: int = 0,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """`shards`: rank 0's part of a sharded model, which computes instead of `model`; see `shards`."""
        self.model = model.eval().requires_grad_(False)
        self._shards = shards
        rows, cache_tokens, kept_tokens = settings.rows, settings.cache_tokens, settings.kept_tokens
        if shards is None:
            use_fewer_kernels(model)
            cache = RowCache(model, rows, cache_tokens)
            decoding = Decoding(model, cache, graphs=settings.graphs)
        else:
            cache = LeadingCache(shards, rows, cache_tokens)
            decoding = LeadingDecoding(shards, cache, graphs=settings.graphs)
            kept_tokens = 0  # the other ranks do not implement saved caches
        super().__init__(Serving(model, version=version, digest=digest), seed)
        self.pad_id = pad_id
        self.max_positions: int | None = max_positions_of(text_config(model))
        self._progressed = progressed
        self._interrupted = threading.Event()
        self._seating = Seating(rows, cache_tokens, kept_tokens)
        self._rows = Rows(self, cache, decoding, reread=settings.reread)
        self._saved: dict[Hashable, SavedCache] = {}
        self._requests: dict[int, _Request] = {}
        """Registered with the seating machine."""
        self._lock = threading.Lock()
        """Guards the fields below. Those above belong to the thread in a step, else to the holder of this lock."""
        self._arrived: list[_Request] = []
        self._cancelled: list[int] = []
        self._ended_keys: list[Hashable] = []
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._next_request = 0
        self._stream: torch.cuda.Stream | None = None
        self._sleep_hook = ExitStack()
        self._sleep_hook.enter_context(self.serving.generation(self._drop_caches))

    @property
    def device(self) -> torch.device:
        return self.serving.device if self._shards is None else self._shards.device

    async def close(self) -> None:
        if self._shards is not None:
            await asyncio.to_thread(self._shards.group.close)

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: Hashable = None) -> Completion:
        """See `RequestEngine.complete`. ConfigError for a request that can never be served."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Completion] = loop.create_future()
        [request] = self._submit([(context, waiter)], sampling, cache_key, loop)
        try:
            # Bounded by the thread: it steps, or fails after `blocked_timeout_s` of `Serving`.
            return await waiter
        except asyncio.CancelledError:
            with self._lock:
                self._cancelled.append(request)
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, repeats: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion per prompt, or `repeats[i]` of prompt i, concurrently. Blocks: not for event loops."""
        contexts = [
            prompt for prompt, count in zip(prompts, repeats or [1] * len(prompts), strict=True) for _ in range(count)
        ]
        waiters = [futures.Future[Completion]() for _ in contexts]
        self._submit(list(zip(contexts, waiters, strict=True)), sampling, None, None)
        return [waiter.result() for waiter in waiters]

    def _submit(
        self,
        requests: Sequence[tuple[Sequence[int], asyncio.Future[Completion] | futures.Future[Completion]]],
        sampling: Sampling,
        key: Hashable,
        loop: asyncio.AbstractEventLoop | None,
    ) -> list[int]:
        for context, _ in requests:
            self._check_fits(len(context), sampling)
        with self._lock:
            if self._broken is not None:
                raise _failure(self._broken)
            first = self._next_request
            self._next_request += len(requests)
            for number, (context, waiter) in enumerate(requests, first):
                self._arrived.append(_Request(Row(number, [*context], len(context), sampling, key), waiter, loop))
            if self._thread is None and requests:
                self._thread = threading.Thread(target=self._serve, name="decode", daemon=True)
                self._thread.start()
            return list(range(first, self._next_request))

    def interrupt(self) -> None:
        """Ends all generations, now and later, at the next decode step, with the tokens so far, until `resume`."""
        self._interrupted.set()

    def resume(self) -> None:
        """Allows generation after `interrupt`."""
        self._interrupted.clear()

    def _check_fits(self, context_tokens: int, sampling: Sampling) -> None:
        """Raises ConfigError for a request that can never be served."""
        if context_tokens == 0:
            raise ConfigError("cannot generate from an empty prompt: at least one token is needed")
        if sampling.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens = {sampling.max_new_tokens}: at least one token must be generated")
        if self.max_positions is not None and context_tokens + sampling.max_new_tokens > self.max_positions:
            raise ConfigError(
                f"a prompt of {context_tokens} tokens and {sampling.max_new_tokens} new ones exceed the model's "
                f"{self.max_positions} positions (of longrope, the original ones); shorten the prompt or max_new_tokens"
            )
        if not self._seating.fits(context_tokens + sampling.max_new_tokens):
            raise ConfigError(
                f"a context of {context_tokens} tokens and {sampling.max_new_tokens} new ones exceed the engine's "
                f"cache_tokens = {self._seating.cache_tokens}; raise it"
            )

    def sample(self, logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Next tokens and their log-probabilities, in float32."""
        params = SamplingParams.of([sampling] * len(logits_BV), logits_BV.device)
        tokens_B, logprobs_B = draw(logits_BV, params, kind_of([sampling]), self.generator)
        return tokens_B[:, None], logprobs_B[:, None]

    def completion(
        self, token_ids: np.ndarray, logprobs: np.ndarray, spans: Sequence[tuple[int, int, str]], ending: Ending
    ) -> Completion:
        """The completion of a row; a span has its first token, version and digest."""
        spans = [span for span in spans if span[0] < len(token_ids)]
        # A row that was interrupted before its first token has no span: report the engine's present weights.
        oldest = min(spans, key=lambda span: span[1], default=(0, self.version, self.digest))
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=np.array([span[:2] for span in spans], dtype=np.int32).reshape(-1, 2),
            ending=ending,
            version=oldest[1],
            digest=oldest[2],
        )

    def forget(self, cache_key: Hashable) -> None:
        """See `RequestEngine.forget`."""
        with self._lock:
            if self._thread is None:
                self._handle(seating.ConversationLeft(cache_key))
            else:
                self._ended_keys.append(cache_key)

    def statistics(self) -> dict[str, float]:
        """Current depths, and counters since the start, by name."""
        return {
            "requests_decoding": float(self._seating.seated),
            "requests_waiting": float(self._seating.waiting),
            "conversations_kept": float(len(self._saved)),
            "read_tokens": float(self._rows.read_tokens),
        }

    # -- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Consumes arrivals, cancellations and ended conversations; produces completions. Ends when idle."""
        try:
            with torch.inference_mode():
                while self._has_work():
                    results = self._interrupt_all() if self._interrupted.is_set() else self._step()
                    self._progressed()
                    _send_results(results)
        except BaseException as error:  # noqa: BLE001 - raised by all requests, in flight and later
            self._fail(error)

    def _has_work(self) -> bool:
        with self._lock:
            if not self._arrived and not self._requests:
                for key in self._ended_keys:
                    self._handle(seating.ConversationLeft(key))
                self._ended_keys, self._cancelled = [], []
                self._thread = None
            return self._thread is not None

    def _step(self) -> list[Result]:
        finished: list[Result] = []
        with self.serving.step() as (version, digest), self._on_stream():
            if self._shards is not None:
                self._shards.fetch(self.model, digest)
            self._take_events()
            self._rows.make_room(self._seating.seated, self._seating.longest_tokens)
            for row in self._rows.step(version, digest):
                finished.append((self._requests[row.request], self._rows.completion(row)))
                self._end(row)
        return finished

    def _on_stream(self) -> AbstractContextManager[Any]:
        """A separate stream on a GPU, so that weights are staged concurrently."""
        if self.device.type != "cuda":
            return nullcontext()
        if self._stream is None or self._stream.device != self.device:
            self._stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._stream)

    def _take_events(self) -> None:
        """Passes new events to the machine. Holds the lock only to take them: the event loop waits for it."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            ended_keys, self._ended_keys = self._ended_keys, []
        for request in arrived:
            self._requests[request.row.request] = request
            longest_tokens = request.row.context_tokens + request.row.sampling.max_new_tokens
            self._handle(seating.RequestArrived(request.row.request, longest_tokens))
        for number in cancelled:
            request = self._requests.get(number)
            if request is not None:
                request.row.key = None
                self._end(request.row)
        for key in ended_keys:
            self._handle(seating.ConversationLeft(key))

    def _end(self, row: Row) -> None:
        """Frees the row's place, and seats the next request."""
        del self._requests[row.request]
        if row in self._rows.rows:
            if row.key is not None:
                self._handle(seating.ConversationPaused(row.key, row.cached), row)
            self._rows.leave(row)
        self._handle(seating.RequestLeft(row.request))

    def _handle(self, event: seating.Event, ended: Row | None = None) -> None:
        effects = self._seating.handle(event, time.monotonic())
        if any(isinstance(effect, seating.Seat) for effect in effects):
            self._rows.make_room(self._seating.seated, self._seating.longest_tokens)
        for effect in effects:
            match effect:
                case seating.Seat(number):
                    row = self._requests[number].row
                    self._rows.seat(row, self._saved.get(row.key))
                    if row.key is not None:
                        self._handle(seating.ConversationLeft(row.key))
                case seating.Keep(key):
                    assert ended is not None
                    self._saved[key] = self._rows.save(ended)
                case seating.Evict(key):
                    self._saved.pop(key, None)

    def _interrupt_all(self) -> list[Result]:
        """Ends all requests with the tokens drawn so far."""
        with self._lock:
            requests = self._remove_all()
        return [(request, self._rows.completion(request.row)) for request in requests]

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._broken = error
            self._thread = None
            requests = self._remove_all()
            self._saved.clear()
        _send_results([(request, _failure(error)) for request in requests])
        with self._lock, suppress(PeerLost):  # a rank that has ended holds no cache
            self._rows.drop_cache()

    def _remove_all(self) -> list[_Request]:
        requests = [*self._requests.values(), *self._arrived]
        self._requests.clear()
        self._rows.clear()
        self._arrived, self._cancelled = [], []
        self._handle(seating.AllLeft())
        return requests

    def _drop_caches(self) -> None:
        """Called by a sleep, between two steps."""
        with self._lock:
            self._rows.drop_cache()
            self._saved.clear()
            self._handle(seating.CachesDropped())

    def __repr__(self) -> str:
        return f"TorchEngine({type(self.model).__name__} on {self.device}, {self.serving}, {self._seating})"


def max_positions_of(config: Any) -> int | None:
    """The longest context and completion. `longrope` encodes all rows of a batch differently once one of them is longer
    than the original maximum, so no row may be."""
    scaling: Any = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    if scaling.get("rope_type") == "longrope":
        limits += [scaling.get("original_max_position_embeddings")]
        limits += [getattr(config, "original_max_position_embeddings", None)]
    return min((limit for limit in limits if limit), default=None)


def _failure(error: BaseException) -> PeerLost:
    lost = PeerLost(f"the engine failed and serves no more requests: {type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost


def _send_results(results: Sequence[Result]) -> None:
    """Sends the results to the callers, with one call per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Result]] = {}
    for request, result in results:
        by_loop.setdefault(request.loop, []).append((request, result))
    for loop, of_loop in by_loop.items():
        if loop is None:
            _resolve(of_loop)
        elif not loop.is_closed():  # a closed loop has no waiting callers
            loop.call_soon_threadsafe(_resolve, of_loop)


def _resolve(results: Sequence[Result]) -> None:
    for request, result in results:
        if request.waiter.done():  # cancelled
            continue
        if isinstance(result, PeerLost):
            request.waiter.set_exception(result)
        else:
            request.waiter.set_result(result)
