"""An OpenAI-compatible endpoint in the worker, in front of its request engine, with a key for each episode.

`/v1/chat/completions`, `/v1/completions` (both also streamed), `/v1/models` and `/inference/v1/generate`. A call with
an episode's key is sampled with the pipeline's settings; its tokens, log-probabilities and versions become part of that
episode's sample. Temperature and similar settings of a request are ignored: samples must come from the trained policy.
A request whose text continues an earlier call of its episode reuses that call's tokens: generated text is never
tokenised again. A stream sends tokens as they are generated; reasoning and tool calls are sent whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.engines.requests import Completion, RequestEngine, Sampling
from penstock.envs.chat import Chat, ChatMessage, assistant_message
from penstock.errors import ConfigError, PeerLost, PenstockError, RunFailed
from penstock.rollout.completions import cut_at, joined
from penstock.runtime.http_guard import PortGuard, bearer

MODEL = "policy"
STREAMED_TOKENS = 8
"""Most tokens in one event of a stream; the first events have fewer."""
MARKUP = ("<", "[TOOL_CALLS]")
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


class Recorded(msgspec.Struct):
    """The calls of one episode."""

    calls: list[Call] = []
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
    messages: list[ChatMessage] = []
    tools: list[Any] = []
    head: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"id": f"cmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": MODEL}
    )

    def text_so_far(self, drawn: Completion) -> str:
        """The text so far, without an incomplete character and without the request's stop strings."""
        text = completion_text(self.tokenizer, self.sampling.stop_ids, drawn)
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        text = text[: min(ends)] if ends else text
        return text.rstrip("\ufffd") if drawn.ending != "stop" else text

    def usage(self, drawn: Completion) -> dict[str, Any]:
        prompt, new = len(self.ids), len(drawn.token_ids)
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "penstock", "param": None, "code": self.code}}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the process, not to its port


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
        guard = PortGuard(self._has_credential)
        config = uvicorn.Config(
            app,
            loop="none",
            http=guard.protocol,  # type: ignore[arg-type]
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
        """Returns a new key, and the record of the calls made with it."""
        key, recorded = f"sk-{secrets.token_urlsafe(24)}", Recorded()
        self._episodes[key] = recorded
        return key, recorded

    def finish(self, key: str) -> None:
        """Ends the episode: its key is invalid from now on."""
        self._episodes.pop(key).closed = True

    def _has_credential(self, url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
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
        tools = body.get("tools") or []
        if self._chat is not None:
            messages = [_incoming(message) for message in messages]
        text, ids = self._continued(episode, messages, tools) or self._opened(episode, messages, tools)
        call = self._engine_request(request, episode, text, ids, body)
        if self._chat is not None:
            call.messages, call.tools = messages, tools

        def message(text: str) -> ChatMessage:
            return _outgoing(assistant_message(text)) if self._chat is not None else _assistant(text)

        if body.get("stream"):
            return _stream(self._chat_chunks(call, message))
        drawn = await self._completed(request, call)
        answer = message(call.text_so_far(drawn))
        choice = {"index": 0, "message": answer, "finish_reason": _chat_reason(answer, drawn)}
        return JSONResponse({"object": "chat.completion", "choices": [choice]} | call.head | call.usage(drawn))

    async def _chat_chunks(
        self, call: _EngineRequest, message: Callable[[str], ChatMessage]
    ) -> AsyncIterator[dict[str, Any]]:
        head = {"object": "chat.completion.chunk"} | call.head

        def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk(_assistant(""))
        sent, drawn = "", None
        async for drawn in self._drawn(call):
            text = call.text_so_far(drawn)
            if (sure := text if self._chat is None else _before_markup(text)).startswith(sent) and len(sure) > len(
                sent
            ):
                yield chunk({"content": sure[len(sent) :]})
                sent = sure
        assert drawn is not None
        answer = message(call.text_so_far(drawn))
        rest = {name: value for name, value in answer.items() if name not in ("role", "content")}
        for number, tool_call in enumerate(rest.get("tool_calls", ())):
            tool_call["index"] = number
        if answer["content"].startswith(sent) and len(answer["content"]) > len(sent):
            rest["content"] = answer["content"][len(sent) :]
        if rest:
            yield chunk(rest)
        yield chunk({}, _chat_reason(answer, drawn)) | call.usage(drawn)

    async def _completions(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            ids = self._checked(prompt, "prompt")
            text = self._tokenizer.decode(ids)
        elif isinstance(prompt, str) and prompt:
            text, ids = prompt, self._ids(episode, prompt)
        else:
            raise _Refused(400, "'prompt' must be a text or a list of token ids")
        call = self._engine_request(request, episode, text, ids, body)
        if body.get("stream"):
            return _stream(self._text_chunks(call))
        drawn = await self._completed(request, call)
        choice = {"index": 0, "text": call.text_so_far(drawn), "finish_reason": _reason(drawn)}
        return JSONResponse({"object": "text_completion", "choices": [choice]} | call.head | call.usage(drawn))

    async def _text_chunks(self, call: _EngineRequest) -> AsyncIterator[dict[str, Any]]:
        head = {"object": "text_completion"} | call.head
        sent, drawn = "", None
        async for drawn in self._drawn(call):
            if len(text := call.text_so_far(drawn)) > len(sent):
                yield head | {"choices": [{"index": 0, "text": text[len(sent) :], "finish_reason": None}]}
                sent = text
        assert drawn is not None
        yield head | {"choices": [{"index": 0, "text": "", "finish_reason": _reason(drawn)}]} | call.usage(drawn)

    async def _generate(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        ids = self._checked(body.get("token_ids"), "token_ids")
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise _Refused(400, "'sampling_params' must be an object")
        call = self._engine_request(request, episode, self._tokenizer.decode(ids), ids, params)
        drawn = await self._completed(request, call)
        tokens, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
        reason = _reason(drawn)
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
        return JSONResponse({"choices": [choice]})

    def _checked(self, ids: Any, field: str) -> list[int]:
        size = self._tokenizer.vocabulary_size
        if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < size for one in ids):
            raise _Refused(400, f"'{field}' must be a list of token ids below {size}")
        return ids

    def _opened(
        self, episode: Recorded, messages: Sequence[ChatMessage], tools: Sequence[Any]
    ) -> tuple[str, list[int]]:
        """The text and tokens of a new conversation."""
        if self._chat is None:
            text = "".join(str(_incoming(message)["content"]) for message in messages)
        else:
            try:
                text = self._chat.with_tools(tools).opening(messages)
            except ConfigError as error:
                raise _Refused(400, str(error)) from error
        return text, self._ids(episode, text)

    def _continued(
        self, episode: Recorded, messages: list[ChatMessage], tools: list[Any]
    ) -> tuple[str, list[int]] | None:
        """The text and tokens of a conversation that continues an earlier call with that call's answer as a message.
        The answer keeps its generated tokens, even if the template would write it differently."""
        if self._chat is None:
            return None
        chat = self._chat.with_tools(tools)
        for call in sorted(episode.calls, key=lambda call: -len(call.messages)):
            shared = len(call.messages)
            if not shared or call.tools != tools or messages[:shared] != call.messages or len(messages) == shared:
                continue
            drawn = self._written(call.drawn)
            answer = completion_text(self._tokenizer, self._sampling.stop_ids, call.drawn)
            if _normalized(messages[shared]) != _normalized(_incoming(_outgoing(assistant_message(answer)))):
                continue
            context = call.text.removesuffix(drawn)
            added = chat.continuation(call.messages, context, drawn, messages[shared + 1 :])
            if added is not None:
                ids = [*call.context, *call.drawn.token_ids.tolist(), *self._encoded(added)]
                return call.text + added, ids
        return None

    def _written(self, drawn: Completion) -> str:
        """The text of a completion, with special tokens."""
        inner, tokens = getattr(self._tokenizer, "inner", None), drawn.token_ids.tolist()
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
        except (PenstockError, ValueError) as error:
            raise _Refused(400, f"the model's tokenizer cannot encode this text: {error}") from error

    def _engine_request(
        self, request: Request, episode: Recorded, text: str, ids: list[int], body: dict[str, Any]
    ) -> _EngineRequest:
        """Checks a request and converts it for the engine; raises `_Refused`."""
        if body.get("n") not in (None, 1):
            raise _Refused(400, "one completion per call: 'n' must be 1")
        most = body.get("max_completion_tokens") or body.get("max_tokens") or self._sampling.max_new_tokens
        if not isinstance(most, int) or most < 1:
            raise _Refused(400, "the number of tokens must be an integer above 0")
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise _Refused(400, "'stop' must be a text or a list of texts")
        longest = self._engine.max_positions
        room = self._sampling.max_new_tokens if longest is None else longest - len(ids)
        count = min(most, self._sampling.max_new_tokens, room)
        if count < 1:
            raise _Refused(
                400,
                f"the context of {len(ids)} tokens leaves no room in the model's {longest} positions",
                "context_length_exceeded",
            )
        sampling = msgspec.structs.replace(self._sampling, max_new_tokens=count)
        session = request.headers.get("x-session-id", "")
        return _EngineRequest(episode, text, ids, sampling, session, tuple(stops), self._tokenizer)

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

    async def _drawn(self, call: _EngineRequest, *, whole: bool = False) -> AsyncIterator[Completion]:
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
                    raise _Refused(503, str(error)) from error
                if more.ending == "interrupted":
                    episode.interrupted = True
                    raise _Refused(503, "the worker was interrupted; the episode will be restarted")
                if episode.closed:
                    raise _Refused(401, "the episode has ended")
                drawn = cut_at(self._tokenizer, [*self._stop_strings, *call.stops], joined(drawn, more))
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
        call.episode.calls.append(Call(call.ids, drawn, text, call.session, call.messages, call.tools))


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _Refused(413, f"a request may have at most {MAX_BODY_BYTES} bytes")
    try:
        found = json.loads(bytes(body))
    except ValueError as error:
        raise _Refused(400, f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _Refused(400, "the request must be a JSON object")
    return found


async def _raise_when_disconnected(request: Request) -> None:
    """Call it after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise _Refused(499, "the client disconnected")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused)
    return JSONResponse(error.body(), status_code=error.status)


def _stream(chunks: AsyncIterator[dict[str, Any]]) -> Response:
    """Server-sent events. An error after the first event is sent as an event too; clients raise it."""

    async def lines() -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    yield f"data: {json.dumps(chunk)}\n\n"
                yield "data: [DONE]\n\n"
            except _Refused as refused:
                yield f"data: {json.dumps(refused.body())}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _before_markup(text: str) -> str:
    """The certain content of an unfinished completion: the text before a mark of reasoning or of a tool call."""
    if text.lstrip()[:1] in ("{", "<", "["):  # a mark, or the beginning of one
        return ""
    ends = [at for mark in MARKUP if (at := text.find(mark)) >= 0]
    return text[: min(ends, default=len(text))].rstrip()


def _chat_reason(message: ChatMessage, drawn: Completion) -> str:
    return "tool_calls" if message.get("tool_calls") else _reason(drawn)


def _reason(drawn: Completion) -> str:
    return "length" if drawn.ending == "length" else "stop"


def _assistant(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


def _outgoing(message: ChatMessage) -> ChatMessage:
    """Encodes the arguments of tool calls as JSON strings, as clients expect."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _normalized(message: ChatMessage) -> list[Any]:
    """The parts that decide whether two messages are equal, independent of the client's formatting."""
    calls = [(call["function"].get("name"), call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "").strip()
    return [message.get("role"), content, message.get("reasoning_content") or None, calls]


def _incoming(message: Any) -> ChatMessage:
    """Converts a client's message for chat templates: arguments as objects, contents as texts."""
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
