"""An OpenAI-compatible endpoint in the worker, in front of its request engine, with a key for each episode.

`/v1/chat/completions`, `/v1/completions` (both also streamed), `/v1/models` and `/inference/v1/generate`. A call with
an episode's key is drawn with the pipeline's own sampling; its tokens, log-probabilities and versions become part of
that episode's sample. Temperature and the like in a request are not followed: the trained policy is what is sampled.
A request whose text goes on from an earlier call of its episode begins with that call's own tokens: nothing that was
drawn is tokenised again. A streamed answer comes in one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.engines.requests import Completion, RequestEngine, Sampling
from penstock.envs.chat import Chat, ChatMessage, assistant_message
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.http_door import Door, bearer

MODEL = "policy"
MAX_BODY_BYTES = 16 << 20


class Call(msgspec.Struct):
    """One completion that an agent asked for."""

    context: list[int]
    drawn: Completion
    text: str
    """The context and the completion, as a request that goes on from here would begin."""
    session: str = ""
    """The request's `X-Session-ID`: which of several agents asked."""


class Recorded(msgspec.Struct):
    """The calls of one episode."""

    calls: list[Call] = []
    closed: bool = False
    interrupted: bool = False
    failure: str = ""
    """Why a completion could not be drawn: no fault of the agent's."""


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the process, not to its port


class Endpoint:
    """Serves on a port of its own, on the loop that `run` runs on."""

    def __init__(self, engine: RequestEngine, tokenizer: Any, sampling: Sampling, chat: Chat | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._chat = chat
        self._episodes: dict[str, Recorded] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={_Refused: _refused})
        door = Door(self._knows)
        config = uvicorn.Config(
            app,
            loop="none",
            http=door.protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serves until `close`."""
        await self._server.serve(sockets=[self._listener])

    def close(self) -> None:
        self._server.should_exit = True

    def open(self) -> tuple[str, Recorded]:
        """A key, and what will be recorded of the calls that are made with it."""
        key, recorded = f"sk-{secrets.token_urlsafe(24)}", Recorded()
        self._episodes[key] = recorded
        return key, recorded

    def finish(self, key: str) -> None:
        """The episode is over: the key opens nothing any more."""
        self._episodes.pop(key).closed = True

    def _knows(self, url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(bearer(key)(url, headers) for key in [*self._episodes])

    def _episode(self, request: Request) -> Recorded:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        found = self._episodes.get(key) if kind.lower() == "bearer" else None
        if found is None:
            raise _Refused(401, "this key belongs to no running episode")
        return found

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "penstock"}]})

    async def _chat_completions(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _Refused(400, "'messages' must be a list of messages")
        text = self._rendered(messages, body.get("tools") or [])
        call = await self._complete(request, episode, text, self._ids(episode, text), body)
        said = self._tokenizer.decode(call.drawn.token_ids.tolist())
        message = _outgoing(assistant_message(said)) if self._chat is not None else _assistant(said)
        reason = "tool_calls" if message.get("tool_calls") else _reason(call.drawn)
        whole = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        } | self._shared(call)
        if not body.get("stream"):
            return JSONResponse(whole)
        delta = {"index": 0, "delta": message, "finish_reason": None}
        end = {"index": 0, "delta": {}, "finish_reason": reason}
        return _stream([whole | {"object": "chat.completion.chunk", "choices": [one]} for one in (delta, end)])

    async def _completions(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            text, ids = self._tokenizer.decode(prompt), prompt
        elif isinstance(prompt, str) and prompt:
            text, ids = prompt, self._ids(episode, prompt)
        else:
            raise _Refused(400, "'prompt' must be a text or a list of token ids")
        call = await self._complete(request, episode, text, ids, body)
        said = self._tokenizer.decode(call.drawn.token_ids.tolist())
        choice = {"index": 0, "text": said, "finish_reason": _reason(call.drawn)}
        whole = {"object": "text_completion", "choices": [choice]} | self._shared(call)
        return _stream([whole]) if body.get("stream") else JSONResponse(whole)

    async def _generate(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
            raise _Refused(400, "'token_ids' must be a list of token ids")
        sampling = body.get("sampling_params") or {}
        call = await self._complete(request, episode, self._tokenizer.decode(ids), ids, sampling)
        tokens, logprobs = call.drawn.token_ids.tolist(), call.drawn.logprobs.tolist()
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
        reason = _reason(call.drawn)
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
        return JSONResponse({"choices": [choice]})

    def _rendered(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> str:
        if self._chat is None:
            return "".join(str(message.get("content") or "") for message in messages)
        try:
            return self._chat.with_tools(tools).opening([_incoming(message) for message in messages])
        except ConfigError as error:
            raise _Refused(400, str(error)) from error

    def _ids(self, episode: Recorded, text: str) -> list[int]:
        """The tokens of a request: those of the earlier call that it goes on from, and what is new."""
        for call in sorted(episode.calls, key=lambda call: -len(call.text)):
            if text.startswith(call.text):
                return [*call.context, *call.drawn.token_ids.tolist(), *self._tokenizer.encode(text[len(call.text) :])]
        bos = () if self._chat is not None else self._tokenizer.bos_ids
        return [*bos, *self._tokenizer.encode(text)]

    async def _complete(
        self, request: Request, episode: Recorded, text: str, ids: list[int], body: dict[str, Any]
    ) -> Call:
        if body.get("n") not in (None, 1):
            raise _Refused(400, "one completion per call: 'n' must be 1")
        most = body.get("max_completion_tokens") or body.get("max_tokens") or self._sampling.max_new_tokens
        if not isinstance(most, int) or most < 1:
            raise _Refused(400, "the number of tokens must be a whole number above 0")
        longest = self._engine.max_positions
        room = self._sampling.max_new_tokens if longest is None else longest - len(ids)
        count = min(most, self._sampling.max_new_tokens, room)
        if count < 1:
            raise _Refused(400, f"the context of {len(ids)} tokens leaves no room in the model's {longest} positions")
        try:
            drawn = await self._engine.complete(ids, msgspec.structs.replace(self._sampling, max_new_tokens=count))
        except PenstockError as error:
            episode.failure = str(error)
            raise _Refused(503, str(error)) from error
        if drawn.ending == "interrupted":
            episode.interrupted = True
            raise _Refused(503, "the worker was interrupted; the episode will be begun again")
        if episode.closed:
            raise _Refused(401, "the episode is over")
        inner = getattr(self._tokenizer, "inner", None)
        tokens = drawn.token_ids.tolist()
        said = inner.decode(tokens, skip_special_tokens=False) if inner else self._tokenizer.decode(tokens)
        call = Call(ids, drawn, text + said, request.headers.get("x-session-id", ""))
        episode.calls.append(call)
        return call

    def _shared(self, call: Call) -> dict[str, Any]:
        prompt, drawn = len(call.context), len(call.drawn.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        return {"id": f"cmpl-{secrets.token_hex(8)}", "created": 0, "model": MODEL, "usage": usage}


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _Refused(413, f"a request has at most {MAX_BODY_BYTES} bytes")
    try:
        found = json.loads(bytes(body))
    except ValueError as error:
        raise _Refused(400, f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _Refused(400, "the request must be a JSON object")
    return found


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused)
    return JSONResponse({"error": {"message": str(error), "type": "penstock"}}, status_code=error.status)


def _stream(chunks: Sequence[dict[str, Any]]) -> Response:
    async def lines() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _reason(drawn: Completion) -> str:
    return "length" if drawn.ending == "length" else "stop"


def _assistant(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


def _outgoing(message: ChatMessage) -> ChatMessage:
    """Arguments of tool calls are texts on the wire."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _incoming(message: Any) -> ChatMessage:
    """As chat templates take it: arguments as objects, contents as texts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Refused(400, "a message is an object with a 'role' and a 'content'")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    changed: ChatMessage = {**message, "content": content or ""}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _object(call["function"].get("arguments"))}}
            for call in calls
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
        ]
    return changed


def _object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
