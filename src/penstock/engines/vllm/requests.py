"""Completions from a vLLM server, many at once: token ids in; token ids, log-probabilities and versions out.

Weights are loaded under a label: their version *and* digest. The server returns each span of tokens with the label of
its weights, so a sample carries what the server reports, also when its weights changed during the completion.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np

from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.vllm.unix_socket import SocketCalls
from penstock.errors import ConfigError, PeerLost, RemoteProtocolError

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"
"""The server prepends it to a request's id; its abort call expects the whole id."""
ABORT_EVERY_S = 0.05
ABORT_S = 10.0
LOST_S = 5.0
"""A connection breaks shortly before the exit code of the server can be read."""
LOOK_EVERY_S = 0.05

ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "interrupted"}


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Answer).decode


def label(version: int, digest: str) -> str:
    """The name of these weights inside the server."""
    return f"{version}:{digest}"


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Sampling in the server's own keys. It truncates in the same order: temperature, min_p, top_k, top_p."""
    if sampling.greedy and sampling.temperature != 1.0:
        raise ConfigError("vLLM records greedy log-probabilities at temperature 1.0 only; sample, or leave it at 1.0")
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
        "ignore_eos": True,  # only the ids below end a completion
        "stop_token_ids": list(sampling.stop_ids),
    }


def completion_of(
    body: bytes,
    held: tuple[int, str],
    published_as: Callable[[int, str], int] = lambda version, digest: version,
    adapter: tuple[int, str] | None = None,
) -> Completion:
    """The server's answer, validated. `held` are the weights to report if no token was drawn; `published_as` maps the
    version in a label to the published one; with an `adapter`, all tokens were drawn with it."""
    try:
        choice = _decode(body).choices[0]
        ending = ENDINGS[choice.finish_reason]
        if adapter is None:
            found = [span for span in choice.weight_versions or () if span.start < span.end]
            labels = [(span.start, *_parsed(span.version)) for span in found]
            spans = [(start, published_as(version, digest), digest) for start, version, digest in labels]
        else:  # the server's labels are of the base model
            spans = [(0, *adapter)] if choice.token_ids else []
    except (msgspec.DecodeError, IndexError, KeyError, ValueError) as error:
        raise RemoteProtocolError(f"the vLLM server's answer cannot be read ({error!r}): {body[:300]!r}") from error
    drawn = choice.logprobs.content if choice.logprobs is not None else []
    if [one.token_id for one in drawn] != choice.token_ids or bool(choice.token_ids) != bool(spans):
        raise RemoteProtocolError(
            f"the vLLM server gave {len(choice.token_ids)} tokens with {len(drawn)} log-probabilities and "
            f"{len(spans)} spans of versions"
        )
    logprobs = np.array([one.logprob for one in drawn], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise RemoteProtocolError("the vLLM server drew a token whose log-probability is not a number")
    _, version, digest = min(spans, key=lambda span: span[1], default=(0, *held))
    return Completion(
        token_ids=np.array(choice.token_ids, dtype=np.int32),
        logprobs=logprobs,
        versions=np.array([span[:2] for span in spans], dtype=np.int32).reshape(-1, 2),
        ending=ending,
        version=version,
        digest=digest,
    )


def _parsed(text: str) -> tuple[int, str]:
    version, _, digest = text.partition(":")
    return int(version), digest


class VllmRequests:
    """A `RequestEngine` over a server's socket. `run` must be running beside it."""

    def __init__(
        self,
        address: str,
        *,
        max_positions: int,
        deadline_s: float,
        held: Callable[[], tuple[int, str]] = lambda: (-1, ""),
        published_as: Callable[[int, str], int] = lambda version, digest: version,
        in_use: Callable[[], AbstractContextManager[tuple[str, int, str]]] | None = None,
        exit_reason: Callable[[], str] = lambda: "",
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """`held` returns the weights that the server holds, `exit_reason` how it ended; `published_as` is that of
        `completion_of`; `in_use` gives a completion its adapter; `deadline_s` bounds one completion."""
        self._calls = SocketCalls(address)
        self.max_positions: int | None = max_positions
        self._held = held
        self._published_as = published_as
        self._in_use = in_use
        self._exit_reason = exit_reason
        self._deadline_s = deadline_s
        self._progressed = progressed
        self._numbers = itertools.count()
        self._in_flight: set[str] = set()
        self._interrupted = asyncio.Event()
        self._allowed = asyncio.Event()

    def __repr__(self) -> str:
        return f"VllmRequests({len(self._in_flight)} in flight, interrupted {self._interrupted.is_set()})"

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    async def close(self) -> None:
        await self._calls.close()

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        """See `RequestEngine.complete`; the server itself finds cached prefixes."""
        if not context:
            raise ConfigError("cannot generate from an empty prompt: it has no token to continue from")
        if self._interrupted.is_set():
            version, digest = self._held()
            nothing = np.zeros(0, dtype=np.int32)
            return Completion(
                nothing, nothing.astype(np.float32), nothing.reshape(0, 2), "interrupted", version, digest
            )
        if self._in_use is None:
            return await self._complete(context, sampling, None)
        with self._in_use() as adapter:
            return await self._complete(context, sampling, adapter)

    async def _complete(
        self, context: Sequence[int], sampling: Sampling, adapter: tuple[str, int, str] | None
    ) -> Completion:
        request_id = str(next(self._numbers))
        body = {"request_id": request_id, "token_ids": list(context), "sampling_params": sampling_params(sampling)}
        if adapter is not None:
            body["model"] = adapter[0]
        self._in_flight.add(request_id)
        try:
            # A cancelled call closes its connection, and the server aborts requests without a reader.
            status, answer = await self._calls.post(GENERATE, msgspec.json.encode(body), self._deadline_s)
        except TimeoutError:
            raise PeerLost(f"the vLLM server did not complete a request within {self._deadline_s:.0f} s") from None
        except (OSError, EOFError) as error:
            raise await self._lost(error) from error
        finally:
            self._in_flight.discard(request_id)
        if status >= 500:
            raise PeerLost(f"the vLLM server answered a request with {status}: {answer[:300]!r}")
        if status >= 400:
            raise RemoteProtocolError(f"the vLLM server refused a request ({status}): {answer[:300]!r}")
        self._progressed()
        return completion_of(answer, self._held(), self._published_as, adapter[1:] if adapter is not None else None)

    def forget(self, cache_key: object) -> None:
        """The server manages its prefix cache itself."""

    def interrupt(self) -> None:
        self._allowed.clear()
        self._interrupted.set()

    def resume(self) -> None:
        self._interrupted.clear()
        self._allowed.set()

    async def run(self) -> None:
        """Executes interruptions until cancelled: requests in flight are aborted and return their tokens so far."""
        while True:
            await self._interrupted.wait()
            while self._in_flight and self._interrupted.is_set():
                await self._abort([ID_PREFIX + request_id for request_id in self._in_flight])
                await asyncio.sleep(ABORT_EVERY_S)  # and again: a request may still be on its way to the server
            await self._allowed.wait()

    async def _abort(self, ids: list[str]) -> None:
        try:
            await self._calls.post(ABORT, msgspec.json.encode({"request_ids": ids}), ABORT_S)
        except (OSError, EOFError) as error:
            raise await self._lost(error) from error

    async def _lost(self, error: Exception) -> PeerLost:
        deadline = time.monotonic() + LOST_S
        while not (exit_reason := self._exit_reason()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        return PeerLost(
            f"the vLLM server {exit_reason or f'was lost with {self.in_flight} requests in flight: {error!r}'}"
        )
