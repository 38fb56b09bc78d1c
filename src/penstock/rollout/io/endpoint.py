"""An OpenAI-compatible endpoint in the worker, in front of its request engine, with a key for each episode.

`/v1/chat/completions`, `/v1/completions` (both also streamed), `/v1/models` and `/inference/v1/generate`. A call with
an episode's key is sampled with the pipeline's settings; its tokens, log-probabilities and versions become part of that
episode's sample. Which parameters a request may have: `rollout/api_requests.py`. Errors are JSON as OpenAI writes them.

A request that continues an earlier call of its episode, with that call's answer as it was sent, reuses that call's
tokens: generated text is never tokenised again. A stream sends tokens as they are generated, a tool call as a whole;
its parts, joined, are the message that a request without a stream would get.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engines.requests import Completion, RequestEngine, Sampling
from penstock.envs.chat import Chat
from penstock.envs.chat_parser import (
    CallIds,
    ChatMessage,
    MessageParser,
    assistant_message,
    ends_in_reasoning,
    without_beginning_of,
)
from penstock.errors import ConfigError, PeerLost, PenstockError, RunFailed
from penstock.records.section import LOOPBACK
from penstock.rollout.api_requests import (
    MODEL,
    ChatRequest,
    Completing,
    Drawing,
    Refused,
    chat_request,
    text_request,
    token_request,
)
from penstock.rollout.completions import cut_at, joined
from penstock.runtime.http_guard import GuardedServer
from penstock.runtime.listening import BACKLOG, bound

log = logging.getLogger(__name__)

STREAMED_TOKENS = 8
"""Most tokens in one event of a stream; the first events have fewer."""
MAX_BODY_BYTES = 16 << 20


class Call(msgspec.Struct):
    """One completion that an agent requested."""

    context: list[int]
    drawn: Completion
    text: str
    """The context and the completion: the prefix of a request that continues this call."""
    session: str = ""
    """The request's `X-Session-ID`: which of several agents made the call."""
    messages: list[ChatMessage] = []
    """With a chat template: the request's messages, as passed to the template."""
    tools: list[Any] = []
    sent: ChatMessage = {}
    """With a chat template: the answer as the agent received it, which of a stream that it left is only a part."""


class Recorded(msgspec.Struct):
    """The calls of one episode."""

    calls: list[Call] = []
    ids: CallIds = msgspec.field(default_factory=CallIds)
    closed: bool = False
    interrupted: bool = False
    failure: str = ""
    """Why a completion could not be generated; not an error of the agent."""
    lost: PenstockError | None = None
    """The error of an engine that generates no more."""


def completion_text(tokenizer: Any, stop_ids: Sequence[int], drawn: Completion) -> str:
    """A completion's text without the token that ended it. With a chat template other special tokens stay: they may
    mark tool calls and reasoning."""
    tokens = drawn.token_ids.tolist()
    inner = getattr(tokenizer, "inner", None)
    if inner is None or getattr(inner, "chat_template", None) is None:
        return tokenizer.decode(tokens)
    ended = drawn.ending == "stop" and tokens[-1:] and tokens[-1] in stop_ids
    return inner.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


class _EngineRequest(msgspec.Struct):
    """One request, ready for the engine."""

    episode: Recorded
    text: str
    ids: list[int]
    sampling: Sampling
    session: str
    stops: tuple[str, ...]
    tokenizer: Any
    parser: MessageParser
    messages: list[ChatMessage] = []
    tools: list[Any] = []
    head: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"id": f"cmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": MODEL}
    )

    def certain_text(self, drawn: Completion, *, complete: bool) -> str:
        """The text without an incomplete character and without the request's stop strings. Of a completion that is not
        complete, only what cannot change any more."""
        text = completion_text(self.tokenizer, self.sampling.stop_ids, drawn)
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)]
        if drawn.ending == "stop":
            return text
        text = text.rstrip("\ufffd")
        return text if complete else without_beginning_of(text, *self.stops)

    def usage(self, drawn: Completion) -> dict[str, int]:
        prompt, new = len(self.ids), len(drawn.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Endpoint:
    """Serves on its own port, on the event loop of `run`."""

    def __init__(
        self,
        engine: RequestEngine,
        tokenizer: Any,
        sampling: Sampling,
        chat: Chat | None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._stop_strings = stop_strings
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._chat = chat
        self._episodes: dict[str, Recorded] = {}
        self._listener = bound(LOOPBACK, 0)
        self._listener.listen(BACKLOG)
        self.base_url = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}/v1"
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
        ]
        handlers: Any = {Refused: _refused, HTTPException: _not_served, Exception: _failed}
        app = _RequestIds(Starlette(routes=routes, exception_handlers=handlers))
        config = uvicorn.Config(
            app,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
        self._server = GuardedServer(config, self._has_credential)

    async def run(self) -> None:
        """Serves until `close`."""
        await self._server.serve(sockets=[self._listener])

    def close(self) -> None:
        self._server.should_exit = True

    def open(self) -> tuple[str, Recorded]:
        """Returns a new key, and the record of the calls made with it."""
        key, recorded = f"sk-{secrets.token_urlsafe(24)}", Recorded()
        self._episodes[key] = recorded
        return key, recorded

    def finish(self, key: str) -> None:
        """Ends the episode: its key is invalid from now on."""
        self._episodes.pop(key).closed = True

    def _has_credential(self, url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        """A search in a table: keys are long and random, and there may be thousands."""
        return any(name == b"authorization" and self._find(value.decode("latin-1")) for name, value in headers)

    def _find(self, authorization: str) -> Recorded | None:
        kind, _, key = authorization.partition(" ")
        return self._episodes.get(key) if kind.lower() == "bearer" else None

    def _episode(self, request: Request) -> Recorded:
        found = self._find(request.headers.get("authorization", ""))
        if found is None:
            raise Refused(401, "this key belongs to no running episode", code="invalid_api_key")
        return found

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        return _json({"object": "list", "data": [_MODEL_CARD]})

    async def _model(self, request: Request) -> Response:
        self._episode(request)
        if request.path_params["name"] != MODEL:
            raise Refused(404, f"there is no such model here; there is {MODEL!r}", code="model_not_found")
        return _json(_MODEL_CARD)

    async def _chat_completions(self, request: Request) -> Response:
        episode = self._episode(request)
        asked = chat_request(await _body(request), self._sampling)
        episode.ids.add(asked.messages)
        if self._chat is None:
            text = self._contents(asked)
            ids, parser = self._ids(episode, text), MessageParser.plain()
        else:
            if asked.messages[-1]["role"] == "assistant":
                reason = "the last message is the assistant's own: an answer cannot begin with a given text"
                raise Refused(400, reason, param=f"messages[{len(asked.messages) - 1}]")
            text, ids = self._continued(episode, asked) or self._opened(episode, asked)
            parser = MessageParser(episode.ids, reasoning=ends_in_reasoning(text), calls=asked.calls)
        call = self._engine_request(request, episode, text, ids, asked, parser)
        if self._chat is not None:
            call.messages, call.tools = asked.messages, asked.tools
        if asked.stream:
            return _stream(self._chat_chunks(call), asked)
        drawn = await self._completed(request, call)
        parser.feed(call.certain_text(drawn, complete=True))
        parser.close()
        choice = {"index": 0, "message": _outgoing(parser.message), "finish_reason": _chat_reason(parser, drawn)}
        choices = {"choices": [choice | {"logprobs": None}], "usage": call.usage(drawn)}
        return _json({"object": "chat.completion"} | call.head | choices)

    async def _chat_chunks(self, call: _EngineRequest) -> AsyncGenerator[dict[str, Any]]:
        head = {"object": "chat.completion.chunk"} | call.head

        def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        parser, calls = call.parser, 0
        async with contextlib.aclosing(self._certain_pieces(call)) as pieces:
            async for text, drawn in pieces:
                for part in parser.feed(text) if drawn is None else parser.feed(text) + parser.close():
                    delta = _outgoing(part)
                    for one in delta.get("tool_calls", ()):
                        one["index"] = calls
                        calls += 1
                    yield chunk(delta)
                if drawn is not None:
                    yield chunk({}, _chat_reason(parser, drawn))
                    yield head | {"choices": [], "usage": call.usage(drawn)}

    async def _certain_pieces(self, call: _EngineRequest) -> AsyncGenerator[tuple[str, Completion | None]]:
        """The text as it grows, in pieces; with the last one, the completion."""
        sent, drawn = "", None
        async with contextlib.aclosing(self._drawn(call)) as growing:
            async for drawn in growing:
                text = call.certain_text(drawn, complete=False)
                if len(text) > len(sent):
                    yield text[len(sent) :], None
                    sent = text
        assert drawn is not None
        yield call.certain_text(drawn, complete=True)[len(sent) :], drawn

    async def _completions(self, request: Request) -> Response:
        episode = self._episode(request)
        asked = text_request(await _body(request), self._sampling)
        prompt = asked.prompt[0] if len(asked.prompt) == 1 and isinstance(asked.prompt[0], str | list) else asked.prompt
        if isinstance(prompt, list):
            ids = self._checked(prompt, "prompt")
            text = self._tokenizer.decode(ids)
        elif prompt:
            text, ids = prompt, self._ids(episode, prompt)
        else:
            raise Refused(400, "'prompt' must be a text or a list of token ids", param="prompt")
        if asked.stream and asked.return_token_ids:
            raise Refused(400, "'return_token_ids' cannot be used with 'stream'", param="return_token_ids")
        stop_ids = self._checked(asked.stop_token_ids, "stop_token_ids") if asked.stop_token_ids else []
        call = self._engine_request(request, episode, text, ids, asked, MessageParser.plain(), stop_ids)
        if asked.stream:
            return _stream(self._text_chunks(call), asked)
        drawn = await self._completed(request, call)
        said = call.certain_text(drawn, complete=True)
        choice = {"index": 0, "text": said, "logprobs": None, "finish_reason": _reason(drawn)}
        if asked.return_token_ids:
            choice["token_ids"] = drawn.token_ids.tolist()
        return _json({"object": "text_completion"} | call.head | {"choices": [choice], "usage": call.usage(drawn)})

    async def _text_chunks(self, call: _EngineRequest) -> AsyncGenerator[dict[str, Any]]:
        head = {"object": "text_completion"} | call.head
        async with contextlib.aclosing(self._certain_pieces(call)) as pieces:
            async for text, drawn in pieces:
                reason = None if drawn is None else _reason(drawn)
                yield head | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}
                if drawn is not None:
                    yield head | {"choices": [], "usage": call.usage(drawn)}

    async def _generate(self, request: Request) -> Response:
        episode = self._episode(request)
        asked, drawing = token_request(await _body(request), self._sampling)
        ids = self._checked(asked.token_ids, "token_ids")
        stop_ids = self._checked(drawing.stop_token_ids, "stop_token_ids") if drawing.stop_token_ids else []
        call = self._engine_request(
            request, episode, self._tokenizer.decode(ids), ids, drawing, MessageParser.plain(), stop_ids
        )
        drawn = await self._completed(request, call)
        tokens, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
        reason = _reason(drawn)
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
        return _json({"choices": [choice]})

    def _checked(self, ids: Any, field: str) -> list[int]:
        size = self._tokenizer.vocabulary_size
        if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < size for one in ids):
            raise Refused(400, f"'{field}' must be a list of token ids below {size}")
        return ids

    def _contents(self, asked: ChatRequest) -> str:
        """The messages for a model without a chat template: their contents, in order."""
        for field, used in (("tools", asked.tools), ("messages", [m for m in asked.messages if m.get("tool_calls")])):
            if used:
                reason = "the model's tokenizer has no chat template, so that it cannot be shown tools or tool calls"
                raise Refused(400, reason, param=field)
        return "".join(message["content"] for message in asked.messages)

    def _opened(self, episode: Recorded, asked: ChatRequest) -> tuple[str, list[int]]:
        """The text and tokens of a new conversation."""
        assert self._chat is not None
        try:
            text = self._chat.with_tools(asked.tools).opening(asked.messages)
        except ConfigError as error:
            raise Refused(400, str(error), param="messages") from error
        return text, self._ids(episode, text)

    def _continued(self, episode: Recorded, asked: ChatRequest) -> tuple[str, list[int]] | None:
        """The text and tokens of a conversation that continues an earlier call with that call's answer as a message.
        The answer keeps its generated tokens, even if the template would write it differently."""
        assert self._chat is not None
        messages = asked.messages
        for call in sorted(episode.calls, key=lambda call: -len(call.messages)):
            shared = len(call.messages)
            if not shared or call.tools != asked.tools or messages[:shared] != call.messages or len(messages) == shared:
                continue
            drawn, answer = self._written(call.drawn), messages[shared]
            context = call.text.removesuffix(drawn)
            if not self._is_answer(answer, call, context):
                continue
            chat = self._chat.with_tools(asked.tools, calls="tool_calls" in call.sent)
            added = chat.continuation(call.messages, context, drawn, answer, messages[shared + 1 :])
            if added is not None:
                ids = [*call.context, *call.drawn.token_ids.tolist(), *self._encoded(added)]
                return call.text + added, ids
        return None

    def _is_answer(self, message: ChatMessage, call: Call, context: str) -> bool:
        """Whether the message is the call's answer: as it was sent, or with the stop string that ended it."""
        text = completion_text(self._tokenizer, self._sampling.stop_ids, call.drawn)
        whole = assistant_message(text, reasoning=ends_in_reasoning(context), calls="tool_calls" in call.sent)
        return _normalized(message) in (_normalized(call.sent), _normalized(whole))

    def _written(self, drawn: Completion) -> str:
        return self._written_ids(drawn.token_ids.tolist())

    def _written_ids(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with special tokens."""
        inner = getattr(self._tokenizer, "inner", None)
        return inner.decode(tokens, skip_special_tokens=False) if inner else self._tokenizer.decode(tokens)

    def _ids(self, episode: Recorded, text: str) -> list[int]:
        """The tokens of a request: those of the earlier call that it continues, and the new ones."""
        for call in sorted(episode.calls, key=lambda call: -len(call.text)):
            if text.startswith(call.text):
                return [*call.context, *call.drawn.token_ids.tolist(), *self._encoded(text[len(call.text) :])]
        bos = () if self._chat is not None else self._tokenizer.bos_ids
        return [*bos, *self._encoded(text)]

    def _encoded(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except (PenstockError, ValueError, TypeError) as error:
            raise Refused(400, f"the model's tokenizer cannot encode this text: {error}") from error

    def _engine_request(
        self,
        request: Request,
        episode: Recorded,
        text: str,
        ids: list[int],
        asked: Drawing,
        parser: MessageParser,
        stop_ids: Sequence[int] = (),
    ) -> _EngineRequest:
        """Converts a request for the engine. Raises Refused if the context is full."""
        longest = self._engine.max_positions
        limit = self._sampling.max_new_tokens
        count = min(asked.token_limit or limit, limit, limit if longest is None else longest - len(ids))
        if count < 1:
            raise Refused(
                400,
                f"the context of {len(ids)} tokens leaves no room in the model's {longest} positions",
                code="context_length_exceeded",
            )
        every = tuple(dict.fromkeys([*self._sampling.stop_ids, *stop_ids]))
        sampling = msgspec.structs.replace(self._sampling, max_new_tokens=count, stop_ids=every)
        session = request.headers.get("x-session-id", "")
        return _EngineRequest(episode, text, ids, sampling, session, asked.stops, self._tokenizer, parser)

    async def _completed(self, request: Request, call: _EngineRequest) -> Completion:
        """The whole completion. It is cancelled, and not recorded, if the client disconnects: a client that timed out
        repeats its call, and the agent sees only that answer."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_raise_when_disconnected(request))
                [*_, drawn] = [drawn async for drawn in self._drawn(call, whole=True)]
                watching.cancel()
        except BaseExceptionGroup as errors:  # the engine's error, or the disconnection
            raise errors.exceptions[0] from errors
        self._record(call, drawn)
        return drawn

    async def _drawn(self, call: _EngineRequest, *, whole: bool = False) -> AsyncGenerator[Completion]:
        """Yields the completion as it grows, or only the `whole` of it, which the caller records. A stream is recorded
        at its end, and also if the agent disconnects, since the agent has seen the tokens so far.

        An engine answers whole requests: a stream is several requests, each continuing the last with the same cache.
        """
        episode, sampling, key = call.episode, call.sampling, None if whole else object()
        left, piece = sampling.max_new_tokens, sampling.max_new_tokens if whole else 1
        drawn: Completion | None = None
        recorded = whole
        try:
            while True:
                context = call.ids if drawn is None else [*call.ids, *drawn.token_ids.tolist()]
                piece_sampling = msgspec.structs.replace(sampling, max_new_tokens=min(piece, left))
                try:
                    more = await self._engine.complete(context, piece_sampling, cache_key=key)
                except PenstockError as error:
                    episode.failure = str(error)
                    if isinstance(error, PeerLost | RunFailed):
                        episode.lost = error
                    raise Refused(503, str(error)) from error
                if more.ending == "interrupted":
                    episode.interrupted = True
                    raise Refused(503, "the worker was interrupted; the episode will be restarted")
                if episode.closed:
                    raise Refused(401, "the episode has ended", code="invalid_api_key")
                drawn = cut_at(self._written_ids, [*self._stop_strings, *call.stops], joined(drawn, more))
                left = sampling.max_new_tokens - len(drawn.token_ids)
                piece = min(2 * piece, STREAMED_TOKENS)
                done = drawn.ending == "stop" or not left
                if done and not recorded:
                    recorded = True
                    self._record(call, drawn)
                yield drawn
                if done:
                    return
        finally:
            if drawn is not None and not recorded and not episode.closed:
                self._record(call, drawn)
            if key is not None:
                self._engine.forget(key)

    def _record(self, call: _EngineRequest, drawn: Completion) -> None:
        text = call.text + self._written(drawn)
        sent = call.parser.message if call.messages else {}  # grows until the whole answer was sent
        call.episode.calls.append(Call(call.ids, drawn, text, call.session, call.messages, call.tools, sent))


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise Refused(413, f"a request may have at most {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise Refused(499, "the client disconnected") from None
    return bytes(body)


async def _raise_when_disconnected(request: Request) -> None:
    """Call it after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise Refused(499, "the client disconnected")


_MODEL_CARD = {"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    # Clients repeat a request after a status above 499. Here that cannot help: the episode has failed.
    return _json(error.body(), error.status, {"x-should-retry": "false"} if error.status >= 500 else None)


async def _not_served(request: Request, error: Exception) -> Response:
    """An unknown path, or another method."""
    assert isinstance(error, HTTPException)
    served = "/v1/chat/completions, /v1/completions, /v1/models and /inference/v1/generate"
    reason = f"{request.method} {request.url.path} is not served: this endpoint has {served}"
    hint = ". Set your framework to Chat Completions" if request.url.path == "/v1/responses" else ""
    return _json(Refused(error.status_code, reason + hint).body(), error.status_code, dict(error.headers or {}))


async def _failed(request: Request, error: Exception) -> Response:
    """A bug here: the server logs the traceback."""
    return _json(Refused(500, "internal error: see the worker's log").body(), 500, {"x-should-retry": "false"})


class _RequestIds:
    """Gives each response the header by which clients name a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", f"req_{secrets.token_hex(12)}".encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _stream(chunks: AsyncGenerator[dict[str, Any]], asked: Completing) -> Response:
    """Server-sent events; the last chunk has no choices but the usage, and is sent if the request asks for it. An error
    after the first event is sent as an event too; clients raise it."""
    with_usage = asked.stream_options.include_usage

    async def lines() -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):
            try:
                async for chunk in chunks:
                    if with_usage or chunk["choices"]:
                        yield f"data: {json.dumps({'usage': None} | chunk if with_usage else chunk)}\n\n"
                yield "data: [DONE]\n\n"
            except Refused as refused:
                yield f"data: {json.dumps(refused.body())}\n\n"
            except Exception:
                log.exception("a stream of the endpoint failed")
                yield f"data: {json.dumps(Refused(500, 'internal error').body())}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _chat_reason(parser: MessageParser, drawn: Completion) -> str:
    return "tool_calls" if parser.message.get("tool_calls") else _reason(drawn)


def _reason(drawn: Completion) -> str:
    return "length" if drawn.ending == "length" else "stop"


def _outgoing(message: ChatMessage) -> ChatMessage:
    """A message, or a part of one, as clients expect it: the arguments of tool calls as JSON texts."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _normalized(message: ChatMessage) -> list[Any]:
    """The parts that decide whether two messages are equal, independent of the client's formatting."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "").strip()
    return [message.get("role"), content, message.get("reasoning_content") or None, calls]
