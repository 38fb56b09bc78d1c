"""Completions from an OpenAI-compatible server that belongs to the user, by `POST /v1/completions`.

Prompts are sent as token ids. If the server returns token ids (`return_token_ids`, as vLLM does), these are used;
otherwise its text is tokenised. Completions have no version of a run and no digest, and their log-probabilities are
nan: the samples can be scored, never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np

from penstock.engines.http.settings import HttpEngineSection
from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.tokenizer import Tokenizer
from penstock.errors import ConfigError, PeerLost, RunFailed

BUSY = (429, 503)
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 10.0
ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length"}


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Answer).decode


def request_of(model: str, context: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """The body of a request. Fields that OpenAI does not define are sent only if they are set."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(context),
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "return_token_ids": True,
    }
    optional = {"stop_token_ids": list(sampling.stop_ids), "top_k": sampling.top_k, "min_p": sampling.min_p}
    body |= {key: value for key, value in optional.items() if value}
    return body | ({"top_p": sampling.top_p} if sampling.top_p != 1.0 else {})


def completion_of(body: bytes, tokenizer: Tokenizer, sampling: Sampling) -> Completion:
    """The server's response, cut after the first stop token: not every server supports `stop_token_ids`."""
    try:
        choice = _decode(body).choices[0]
        ending = ENDINGS[choice.finish_reason]
    except (msgspec.DecodeError, IndexError, KeyError) as error:
        raise RunFailed(f"the server's response is not an OpenAI completion ({error!r}): {body[:300]!r}") from error
    ids = tokenizer.encode(choice.text) if choice.token_ids is None else choice.token_ids
    for position, token in enumerate(ids, 1):
        if token in sampling.stop_ids:
            ids, ending = ids[:position], "stop"
            break
    return _completion(ids, ending)


def _completion(ids: Sequence[int], ending: Ending) -> Completion:
    spans = [(0, 0)] if ids else []
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        versions=np.array(spans, dtype=np.int32).reshape(-1, 2),
        ending=ending,
        version=0,
        digest="",
    )


class HttpEngine:
    """One server that the user runs. Implements `BareEngine` and `RequestEngine`."""

    def __init__(
        self,
        section: HttpEngineSection,
        tokenizer: Tokenizer,
        *,
        key: str = "",
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self.capabilities = section.capabilities
        self.max_positions = section.max_length
        self._section = section
        self._tokenizer = tokenizer
        self._progressed = progressed
        self._client = httpx.AsyncClient(
            base_url=section.url.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=None,  # every call is bounded by `request_s`
            limits=httpx.Limits(max_connections=section.max_requests),
        )
        self._slots = asyncio.Semaphore(section.max_requests)
        self._interrupted = False
        self._interruptions = 0
        self._in_flight: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"HttpEngine({self._section.serves}, {len(self._in_flight)} in flight)"

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        """See `RequestEngine.complete`; an interrupted request returns no tokens, since responses are not streamed."""
        if not context:
            raise ConfigError("cannot generate from an empty prompt: at least one token is needed")
        where, interruptions = self._section.serves, self._interruptions
        async with self._slots:
            if self._interrupted or interruptions != self._interruptions:
                return _completion([], "interrupted")
            try:
                answer = await self._bounded(request_of(self._section.model_name, context, sampling))
            except TimeoutError:
                if interruptions != self._interruptions:
                    return _completion([], "interrupted")
                raise PeerLost(f"{where}: no completion within {self._section.request_s:.0f} s") from None
            except httpx.HTTPError as error:
                raise PeerLost(f"{where}: cannot be reached: {error!r}") from error
        if not answer.is_success:
            raise RunFailed(f"{where}: refused a request ({answer.status_code}): {answer.text[:300]}")
        self._progressed()
        return completion_of(answer.content, self._tokenizer, sampling)

    async def _bounded(self, body: dict[str, Any]) -> httpx.Response:
        """Raises TimeoutError after `request_s`, or when it is interrupted."""
        async with asyncio.timeout(self._section.request_s) as bound:
            self._in_flight.add(bound)
            try:
                return await self._post(body)
            finally:
                self._in_flight.discard(bound)

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        pause_s = RETRY_FIRST_S
        while (answer := await self._client.post("/v1/completions", json=body)).status_code in BUSY:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)
        return answer

    def forget(self, cache_key: object) -> None:
        """A no-op: the server manages its prefix cache."""

    def interrupt(self) -> None:
        self._interrupted = True
        self._interruptions += 1
        for bound in self._in_flight:
            bound.reschedule(0.0)

    def resume(self) -> None:
        self._interrupted = False

    async def close(self) -> None:
        await self._client.aclose()

    def statistics(self) -> dict[str, float]:
        return {"requests": float(len(self._in_flight))}
