"""Requests of the OpenAI API, as the endpoint for agents accepts them.

Each parameter is used, has no effect on the tokens, or is refused unless it has a value that changes nothing: no
parameter is ignored in silence. The tables below are those of the guide on agents. `null` is the same as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from penstock.engines.requests import Sampling
from penstock.envs.chat_parser import ChatMessage, parsed_json

MODEL = "policy"
"""The name of the model in training."""

Positive = Annotated[int, msgspec.Meta(ge=1)]

WITHOUT_EFFECT = (
    *("metadata", "store", "user", "safety_identifier", "service_tier", "seed", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority"),
)
"""Accepted, whatever their value: they do not change which tokens are likely."""

_TEXT_ONLY = "the model writes text only"
_UNCONSTRAINED = "completions are not constrained: describe the format in a message, and parse the answer"
_DISTRIBUTION = "samples must come from the trained policy, whose distribution this changes"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "each call has one completion: call again for more"),
    "best_of": ((1,), "each call has one completion"),
    "response_format": (({"type": "text"},), _UNCONSTRAINED),
    "parallel_tool_calls": ((True,), "an answer may have several calls: the agent may run the first alone"),
    "logprobs": ((False,), "log-probabilities are recorded for the trainer, not returned"),
    "top_logprobs": ((0,), "log-probabilities are recorded for the trainer, not returned"),
    "logit_bias": (({},), _DISTRIBUTION),
    "presence_penalty": ((0,), _DISTRIBUTION),
    "frequency_penalty": ((0,), _DISTRIBUTION),
    "repetition_penalty": ((1,), _DISTRIBUTION),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "reasoning_effort": ((), "the chat template decides whether the model reasons"),
    "verbosity": (("medium",), "describe it in a message"),
    "chat_template_kwargs": (({},), "the chat template has no arguments but the messages and the tools"),
    "web_search_options": ((), "no tool runs here: the agent runs its own"),
    "functions": (([],), "it is deprecated: use 'tools'"),
    "function_call": (("auto", "none"), "it is deprecated: use 'tool_choice'"),
    "echo": ((False,), "the prompt is not returned"),
    "suffix": (("",), "text is continued at its end only"),
}
"""Refused, but for these values; and why. Other names are refused too."""


class Refused(Exception):
    """A request that is answered with an error: by its status, clients repeat it or not."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Drawing(msgspec.Struct, kw_only=True):
    """The parameters of all kinds of requests."""

    max_tokens: Positive | None = None
    stop: str | list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self, sampling: Sampling) -> None:
        """Raises for a setting of the distribution that is not that of the pipeline."""
        if "" in self.stops:
            raise Refused(400, "'stop' must not have empty texts", param="stop")
        for name in ("temperature", "top_p", "top_k", "min_p"):
            wanted, own = getattr(self, name), getattr(sampling, name)
            accepted = [own, *([0] if name == "temperature" and sampling.greedy else [])]
            accepted += [-1, 0] if name == "top_k" and own is None else []
            if wanted is not None and wanted not in accepted:
                raise Refused(
                    400,
                    f"'{name}' is {wanted}, but this run draws with {own}: samples must come from the trained policy. "
                    f"Leave '{name}' out of the request, or set pipeline.rollout.{name}",
                    param=name,
                )


class Completing(Drawing, kw_only=True):
    """The parameters of the OpenAI API."""

    model: str = MODEL
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class ChatRequest(Completing, kw_only=True):
    """`/v1/chat/completions`"""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    max_completion_tokens: Positive | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def calls(self) -> bool:
        """Whether the answer may have tool calls."""
        return bool(self.tools) and self.tool_choice != "none"


class TextRequest(Completing, kw_only=True):
    """`/v1/completions`"""

    prompt: str | list[Any]
    stop_token_ids: list[int] = []
    return_token_ids: bool = False


class TokenDrawing(Drawing, kw_only=True):
    """`sampling_params` of a request for tokens."""

    stop_token_ids: list[int] = []
    logprobs: int | None = None
    skip_special_tokens: bool = False


class TokenRequest(msgspec.Struct):
    """`/inference/v1/generate`"""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str = MODEL


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _ToolCall(msgspec.Struct):
    function: _Function
    type: str | None = "function"
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class _Described(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Described


_Request = TypeVar("_Request", bound=msgspec.Struct)


def chat_request(body: bytes, sampling: Sampling) -> ChatRequest:
    """The request, with messages as chat templates take them. Raises Refused."""
    request = _checked(body, ChatRequest, sampling)
    if not request.messages:
        raise Refused(400, "'messages' is empty", param="messages")
    request.messages = [_message(message, f"messages[{at}]") for at, message in enumerate(request.messages)]
    for at, tool in enumerate(request.tools):
        if (kind := tool.get("type", "function")) != "function":
            reason = (
                f"tools[{at}] has the type {kind!r}: only tools that the agent runs, of type 'function', can be used"
            )
            raise Refused(400, reason, param=f"tools[{at}].type")
        _converted(tool, _Tool, f"tools[{at}]")
    if request.tool_choice not in ("auto", "none"):
        reason = "'tool_choice' must be 'auto' or 'none': completions are not constrained, so a call cannot be forced"
        raise Refused(400, reason, param="tool_choice")
    return request


def text_request(body: bytes, sampling: Sampling) -> TextRequest:
    return _checked(body, TextRequest, sampling)


def token_request(body: bytes, sampling: Sampling) -> tuple[TokenRequest, TokenDrawing]:
    request = _convert(_decoded(body), TokenRequest)
    _check_model(request.model)
    drawing = _convert(request.sampling_params, TokenDrawing, "sampling_params")
    drawing.check(sampling)
    return request, drawing


def _checked(body: bytes, schema: type[Any], sampling: Sampling) -> Any:
    request = _convert(_decoded(body), schema)
    _check_model(request.model)
    request.check(sampling)
    return request


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(400, f"the request is not JSON: {error}") from error
    except RecursionError:
        raise Refused(400, "the request is nested too deeply") from None
    if not isinstance(found, dict):
        raise Refused(400, "the request must be a JSON object")
    return found


def _convert(found: dict[str, Any], schema: type[_Request], place: str = "") -> _Request:
    """Checks the parameters, also those that are not used."""
    used = schema.__struct_fields__
    for name, value in found.items():
        if value is None or name in used or name in WITHOUT_EFFECT:
            continue
        accepted, reason = REFUSED.get(name, ((), "no such parameter is known here"))
        if value not in accepted:
            raise Refused(400, f"{name!r} cannot be used: {reason}", param=_joined(place, name))
    return _converted({name: value for name, value in found.items() if value is not None}, schema, place)


def _converted(found: Any, schema: type[_Request], place: str) -> _Request:
    try:
        return msgspec.convert(found, schema)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        missing = re.search(r"missing required field `(\w+)`", reason)
        param = _joined(place, path.rstrip("`").lstrip("."))
        if missing:
            param = _joined(param, missing[1])
        raise Refused(400, f"{param}: {reason[0].lower()}{reason[1:]}", param=param) from None


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}".strip(".")


def _check_model(name: str) -> None:
    if name != MODEL:
        raise Refused(
            404,
            f"there is no model {name!r} here: this endpoint serves {MODEL!r}, the model in training, and every call "
            f"is trained. Ask for model={MODEL!r}. Another model, such as a judge, needs its own base_url and key",
            param="model",
            code="model_not_found",
        )


def _message(message: dict[str, Any], place: str) -> ChatMessage:
    """As chat templates take it: the content as a text, arguments of tool calls as objects."""
    found = _converted(message, _Message, place)
    role = "system" if found.role == "developer" else found.role
    if role not in ("system", "user", "assistant", "tool"):
        hint = ": it is deprecated, use 'tool'" if role == "function" else ""
        raise Refused(400, f"{place} has the role {role!r}, which is unknown here{hint}", param=f"{place}.role")
    for field in ("function_call", "audio", "refusal"):
        if message.get(field):
            raise Refused(400, f"{place}.{field} cannot be shown to the model", param=f"{place}.{field}")
    if found.content is None and role in ("system", "user"):
        raise Refused(400, f"{place} has no content", param=f"{place}.content")
    content = _text(found.content, f"{place}.content") if isinstance(found.content, list) else found.content
    named = {name: value for name, value in message.items() if value is not None}
    changed: ChatMessage = {**named, "role": role, "content": content or ""}
    if found.tool_calls:
        if role != "assistant":
            raise Refused(400, f"{place} has tool calls, but the role {role!r}", param=f"{place}.tool_calls")
        calls = zip(message["tool_calls"], found.tool_calls, strict=True)
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(checked.function.arguments)}}
            for call, checked in calls
        ]
    return changed


def _text(parts: Sequence[dict[str, Any]], place: str) -> str:
    for at, part in enumerate(parts):
        if part.get("type") != "text":
            raise Refused(
                400,
                f"{place}[{at}] is of type {part.get('type')!r}: the model reads text only and would answer without",
                param=f"{place}[{at}]",
                code="unsupported_content",
            )
        if not isinstance(part.get("text"), str):
            raise Refused(400, f"{place}[{at}].text must be a text", param=f"{place}[{at}].text")
    return "".join(part["text"] for part in parts)


def _object(arguments: str | dict[str, Any]) -> Any:
    """The arguments of a tool call; a text that is no JSON stays a text."""
    found = parsed_json(arguments) if isinstance(arguments, str) else arguments
    return arguments if found is None else found
