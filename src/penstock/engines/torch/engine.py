"""The engine on torch, on CPU and GPU: many completions in flight, decoded together by one thread.

Callers await on the event loop; the thread does what the seating machine decides, one step after the other, and ends
when nothing is in flight. Weights change between two of its steps, as for every engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.serving import Serving, ServingEngine
from penstock.engines.torch import seating
from penstock.engines.torch.cache import RowCache
from penstock.engines.torch.decoding import Decoding
from penstock.engines.torch.kernels import use_fewer_kernels
from penstock.engines.torch.rows import Row, Rows, SavedCache
from penstock.engines.torch.sampling import Ways, draw, kind_of
from penstock.engines.torch.seating import Seating
from penstock.engines.torch.settings import TorchEngineSection
from penstock.engines.torch.shards import LeadingCache, LeadingDecoding, Shards
from penstock.errors import ConfigError, PeerLost


class _Request(msgspec.Struct, eq=False):
    row: Row
    waiter: asyncio.Future[Completion] | futures.Future[Completion]
    loop: asyncio.AbstractEventLoop | None
    """The waiter's, if it is a loop that waits."""


Result = tuple[_Request, Completion | PeerLost]


class TorchEngine(ServingEngine):
    """One causal language model in this process, on one device. Implements `RequestEngine`.

    At most `rows` completions are decoded together, and rows times the longest of them is at most `cache_tokens`; the
    rest wait in the order they came. Between two turns at most `kept_tokens` tokens of conversations stay in memory;
    one that was dropped is read again. With `reread` a token's whole context was read with the weights it was drawn
    with. An error in the thread fails every request, those in flight and all later ones, with that error.
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
        """`shards`: this rank's part of the model, which computes instead of `model`; see `shards`."""
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
            kept_tokens = 0  # what rank 0 keeps of a conversation, the others would have to keep too
        super().__init__(Serving(model, version=version, digest=digest), seed)
        self.pad_id = pad_id
        config: Any = getattr(model, "config", None)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._progressed = progressed
        self._interrupted = threading.Event()
        self._seating = Seating(rows, cache_tokens, kept_tokens)
        self._rows = Rows(self, cache, decoding, reread=settings.reread)
        self._saved: dict[Hashable, SavedCache] = {}
        self._requests: dict[int, _Request] = {}
        """Known to the seating machine."""
        self._news = threading.Lock()
        """Guards what follows. What stands above belongs to the thread in a step, else to the holder of this lock."""
        self._arrived: list[_Request] = []
        self._given_up: list[int] = []
        self._forgotten: list[Hashable] = []
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._next_request = 0
        self._stream: torch.cuda.Stream | None = None
        self._sleeps = ExitStack()
        self._sleeps.enter_context(self.serving.generation(self._drop_caches))

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
            # Bounded by the thread: it steps, or fails after the time that a sleeping engine may sleep.
            return await waiter
        except asyncio.CancelledError:
            with self._news:
                self._given_up.append(request)
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, repeats: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion per prompt, or `repeats[i]` of prompt i, side by side. Blocks; for any thread but a loop's."""
        contexts = [
            prompt for prompt, often in zip(prompts, repeats or [1] * len(prompts), strict=True) for _ in range(often)
        ]
        waiters = [futures.Future[Completion]() for _ in contexts]
        self._submit(list(zip(contexts, waiters, strict=True)), sampling, None, None)
        return [waiter.result() for waiter in waiters]

    def _submit(
        self,
        wanted: Sequence[tuple[Sequence[int], asyncio.Future[Completion] | futures.Future[Completion]]],
        sampling: Sampling,
        key: Hashable,
        loop: asyncio.AbstractEventLoop | None,
    ) -> list[int]:
        for context, _ in wanted:
            self._check_fits(len(context), sampling)
        with self._news:
            if self._broken is not None:
                raise _lost(self._broken)
            first = self._next_request
            self._next_request += len(wanted)
            for number, (context, waiter) in enumerate(wanted, first):
                self._arrived.append(_Request(Row(number, [*context], len(context), sampling, key), waiter, loop))
            if self._thread is None and wanted:
                self._thread = threading.Thread(target=self._serve, name="decode", daemon=True)
                self._thread.start()
            return list(range(first, self._next_request))

    def interrupt(self) -> None:
        """Ends all generations, now and later, at the next decode step, with what they have; `resume` undoes it."""
        self._interrupted.set()

    def resume(self) -> None:
        """Allows generation after `interrupt`."""
        self._interrupted.clear()

    def _check_fits(self, context_tokens: int, sampling: Sampling) -> None:
        """ConfigError for what can never be generated."""
        if context_tokens == 0:
            raise ConfigError("cannot generate from an empty prompt: it has no token to go on from")
        if self.max_positions is not None and context_tokens + sampling.max_new_tokens > self.max_positions:
            raise ConfigError(
                f"a prompt of {context_tokens} tokens and {sampling.max_new_tokens} new ones exceed the model's "
                f"{self.max_positions} positions; shorten the prompt or max_new_tokens"
            )
        if not self._seating.fits(context_tokens + sampling.max_new_tokens):
            raise ConfigError(
                f"a context of {context_tokens} tokens and {sampling.max_new_tokens} new ones exceed the engine's "
                f"cache_tokens = {self._seating.cache_tokens}; raise it"
            )

    def sample(self, logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Next tokens and the log-probabilities of drawing them, in float32."""
        ways = Ways.of([sampling] * len(logits_BV), logits_BV.device)
        tokens_B, logprobs_B = draw(logits_BV, ways, kind_of([sampling]), self.generator)
        return tokens_B[:, None], logprobs_B[:, None]

    def completion(
        self, token_ids: np.ndarray, logprobs: np.ndarray, spans: Sequence[tuple[int, int, str]], ending: Ending
    ) -> Completion:
        """A row as it is given out; a span says from which token on which version and digest."""
        spans = [span for span in spans if span[0] < len(token_ids)]
        # Interrupted before its first token, a row has no weights of its own; the engine's present ones are the truth.
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
        with self._news:
            if self._thread is None:
                self._tell_machine(seating.ConversationLeft(cache_key))
            else:
                self._forgotten.append(cache_key)

    def statistics(self) -> dict[str, float]:
        """Depths now and counters since the start, by plain names."""
        return {
            "requests_decoding": float(self._seating.seated),
            "requests_waiting": float(self._seating.waiting),
            "conversations_kept": float(len(self._saved)),
            "read_tokens": float(self._rows.read_tokens),
        }

    # -- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Consumes arrivals, cancellations and forgotten conversations; produces completions. Ends when idle."""
        try:
            with torch.inference_mode():
                while self._goes_on():
                    results = self._interrupt_all() if self._interrupted.is_set() else self._step()
                    self._progressed()
                    _tell(results)
        except BaseException as error:  # noqa: BLE001 - raised by every request, now and later
            self._fail(error)

    def _goes_on(self) -> bool:
        with self._news:
            if not self._arrived and not self._requests:
                for key in self._forgotten:
                    self._tell_machine(seating.ConversationLeft(key))
                self._forgotten, self._given_up = [], []
                self._thread = None
            return self._thread is not None

    def _step(self) -> list[Result]:
        finished: list[Result] = []
        with self.serving.step() as (version, digest), self._on_stream():
            if self._shards is not None:
                self._shards.fetch(self.model, digest)
            self._take_news()
            self._rows.make_room(self._seating.seated, self._seating.longest_tokens)
            for row in self._rows.step(version, digest):
                finished.append((self._requests[row.request], self._rows.completion(row)))
                self._end(row)
        return finished

    def _on_stream(self) -> AbstractContextManager[Any]:
        """One of its own on a GPU, so that weights are staged beside it."""
        if self.device.type != "cuda":
            return nullcontext()
        if self._stream is None or self._stream.device != self.device:
            self._stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._stream)

    def _take_news(self) -> None:
        """Tells the machine. The lock is not held for longer than it takes to look: the event loop waits for it."""
        with self._news:
            arrived, self._arrived = self._arrived, []
            given_up, self._given_up = self._given_up, []
            forgotten, self._forgotten = self._forgotten, []
        for request in arrived:
            self._requests[request.row.request] = request
            longest_tokens = request.row.context_tokens + request.row.sampling.max_new_tokens
            self._tell_machine(seating.RequestArrived(request.row.request, longest_tokens))
        for number in given_up:
            request = self._requests.get(number)
            if request is not None:
                request.row.key = None
                self._end(request.row)
        for key in forgotten:
            self._tell_machine(seating.ConversationLeft(key))

    def _end(self, row: Row) -> None:
        """Its place is free for the next."""
        del self._requests[row.request]
        if row in self._rows.rows:
            if row.key is not None:
                self._tell_machine(seating.ConversationPaused(row.key, row.cached), row)
            self._rows.leave(row)
        self._tell_machine(seating.RequestLeft(row.request))

    def _tell_machine(self, event: seating.Event, ended: Row | None = None) -> None:
        effects = self._seating.handle(event, time.monotonic())
        if any(isinstance(effect, seating.Seat) for effect in effects):
            self._rows.make_room(self._seating.seated, self._seating.longest_tokens)
        for effect in effects:
            match effect:
                case seating.Seat(number):
                    row = self._requests[number].row
                    self._rows.seat(row, self._saved.get(row.key))
                    if row.key is not None:
                        self._tell_machine(seating.ConversationLeft(row.key))
                case seating.Keep(key):
                    assert ended is not None
                    self._saved[key] = self._rows.save(ended)
                case seating.Evict(key):
                    self._saved.pop(key, None)

    def _interrupt_all(self) -> list[Result]:
        """Ends every request with the tokens it has."""
        with self._news:
            requests = self._all_leave()
        return [(request, self._rows.completion(request.row)) for request in requests]

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._broken = error
            self._thread = None
            requests = self._all_leave()
            self._rows.drop_cache()
            self._saved.clear()
        _tell([(request, _lost(error)) for request in requests])

    def _all_leave(self) -> list[_Request]:
        requests = [*self._requests.values(), *self._arrived]
        self._requests.clear()
        self._rows.clear()
        self._arrived, self._given_up = [], []
        self._tell_machine(seating.AllLeft())
        return requests

    def _drop_caches(self) -> None:
        """Between two steps, by order of a sleep."""
        with self._news:
            self._rows.drop_cache()
            self._saved.clear()
            self._tell_machine(seating.CachesDropped())

    def __repr__(self) -> str:
        return f"TorchEngine({type(self.model).__name__} on {self.device}, {self.serving}, {self._seating})"


def _lost(error: BaseException) -> PeerLost:
    lost = PeerLost(f"the engine failed and serves no more requests: {type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost


def _tell(results: Sequence[Result]) -> None:
    """Wakes the callers, all of a loop at once."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Result]] = {}
    for request, result in results:
        by_loop.setdefault(request.loop, []).append((request, result))
    for loop, of_loop in by_loop.items():
        if loop is None:
            _wake(of_loop)
        elif not loop.is_closed():  # no caller waits on a closed one
            loop.call_soon_threadsafe(_wake, of_loop)


def _wake(results: Sequence[Result]) -> None:
    for request, result in results:
        if request.waiter.done():  # given up
            continue
        if isinstance(result, PeerLost):
            request.waiter.set_exception(result)
        else:
            request.waiter.set_result(result)
