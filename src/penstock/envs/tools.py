"""Tools are plain functions. A completion contains the call; the result is the environment's reply.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

The policy receives `<tool_result>3</tool_result>` and takes another turn. For an invalid call it receives the reason:
the policy learns from mistakes, and the run does not fail. With `forget_mistakes` a mistake does not stay in the
context: the reason replaces the mistaken completion, and the policy tries again from there.

With prompts of messages, the model's chat template defines the format of tools, calls and results. It is shown each
tool's name, docstring and typed parameters, with descriptions from an `Args:` block if the docstring has one.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

from penstock.envs.chat_parser import CallIds, assistant_message
from penstock.envs.protocol import DividedEnvironment, GoBack, Message, Prompt, TextEnvironment, prompts_per_pass
from penstock.envs.rewards import call_by_name
from penstock.errors import ConfigError

MISTAKE = "error: "
"""Prefix of the answer to an invalid call."""

TOOL_LETTERS = "".join(map(chr, range(32, 127))) + "\n"
"""The characters of calls and their results."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class WithTools:
    """A text environment with functions that its policy may call. A completion without a call ends the episode."""

    hold_out: Callable[[int], WithTools]
    """As of the environment; only if it has this method."""

    def __init__(
        self,
        environment: TextEnvironment,
        tools: Sequence[Callable[..., Any]],
        *,
        introduce: bool = True,
        forget_mistakes: bool = False,
    ):
        self.environment = environment
        self.tools: Mapping[str, Callable[..., Any]] = {tool.__name__: tool for tool in tools}
        if len(self.tools) != len(tools):
            raise ConfigError(f"two tools share a name: {sorted(tool.__name__ for tool in tools)}")
        self.introduce = introduce
        self.forget_mistakes = forget_mistakes
        if isinstance(environment, DividedEnvironment):
            self.hold_out = self._hold_out

    def __getattr__(self, name: str) -> Any:
        """An `alphabet` and a `close`, if the environment has them."""
        if name not in ("alphabet", "close"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.environment, name)
        return self._with_own_letters(found) if name == "alphabet" else found

    def _hold_out(self, count: int) -> WithTools:
        held_out = copy.copy(self)
        held_out.environment = self.environment.hold_out(count)  # type: ignore[attr-defined]
        del held_out.hold_out  # it is bound to this object, and a held-out part is not divided again
        return held_out

    def _with_own_letters(self, alphabet: str) -> str:
        """Adds the characters of tools and their descriptions."""
        return alphabet + "".join(sorted(set(self.description() + TOOL_LETTERS) - set(alphabet)))

    @property
    def count(self) -> int | None:
        return self.environment.count

    @property
    def rows(self) -> int | None:
        return prompts_per_pass(self.environment)

    def prompt(self, position: int) -> Prompt:
        prompt = self.environment.prompt(position)
        if not self.introduce or prompt.messages:  # the chat template introduces the tools
            return prompt
        return msgspec.structs.replace(prompt, text=f"{self.description()}\n\n{prompt.text}")

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return call_by_name(self.environment.score, prompts, completions, columns)

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | Sequence[Message] | GoBack | None:
        if prompt.messages:
            return self._messages(prompt, completions)
        answers = [self.answer(call) for call in _CALL.findall(completions[-1])]
        if not answers:
            return None
        text = "".join(f"<tool_result>{answer}</tool_result>" for answer in answers)
        mistaken = all(answer.startswith(MISTAKE) for answer in answers)
        return GoBack(len(completions) - 1, text) if mistaken and self.forget_mistakes else text

    def _messages(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[Message] | None:
        """One message per call of the last completion, with the role `tool`."""
        ids = CallIds(message.plain() for message in prompt.messages)
        *_, last = [assistant_message(completion, ids) for completion in completions]
        calls = last.get("tool_calls", [])
        answers = [self.answer(json.dumps(call["function"])) for call in calls]
        return [
            Message("tool", answer, name=call["function"]["name"], tool_call_id=call["id"])
            for call, answer in zip(calls, answers, strict=True)
        ] or None

    def answer(self, body: str) -> str:
        """The result of one call, or the reason why it failed."""
        try:
            call = msgspec.json.decode(body, type=ToolCall)
        except msgspec.DecodeError as error:
            return f"{MISTAKE}a call must be JSON with 'name' and 'arguments': {error}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"{MISTAKE}there is no tool {call.name!r}; there are {', '.join(self.tools)}"
        try:
            return str(tool(**call.arguments))
        except Exception as error:  # noqa: BLE001 - the policy receives it
            return f"{MISTAKE}{type(error).__name__}: {error}"

    def description(self) -> str:
        """The tools as the prompt introduces them: signatures and first lines of documentation."""
        lines = [
            f"- {name}{inspect.signature(tool)}: {(inspect.getdoc(tool) or '').partition(chr(10))[0]}"
            for name, tool in self.tools.items()
        ]
        usage = 'To use a tool write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
        return "\n".join(["Tools:", *lines, usage])

    def __repr__(self) -> str:
        return f"WithTools({self.environment!r}, {', '.join(self.tools)})"


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """What a chat template shows of a tool. The parameters are described if its docstring has an `Args:` block."""
    from transformers.utils import chat_template_utils as templates

    try:
        return templates.get_json_schema(tool)
    except (templates.DocstringParsingException, templates.TypeHintParsingException):
        pass  # it insists on a description and a type for each parameter
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(tool)  # pyright: ignore[reportArgumentType] - it takes functions too
        parameters = adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(f"tool {tool.__name__!r}: a chat template cannot show its parameters: {error}") from error
    properties = parameters.get("properties", {})
    shown = {"type": "object", "properties": {name: _without_title(one) for name, one in properties.items()}}
    shown |= {"required": parameters["required"]} if "required" in parameters else {}
    description = inspect.getdoc(tool) or ""
    return {"type": "function", "function": {"name": tool.__name__, "description": description, "parameters": shown}}


def _without_title(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "title"}
