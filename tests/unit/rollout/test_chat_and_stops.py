"""What the engine reads and where its completions end: chat templates, stop tokens, a token before every text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from penstock.engines.requests import Completion, Sampling
from penstock.engines.tokenizer import PretrainedTokenizer, load_tokenizer
from penstock.envs.protocol import Message, Prompt
from penstock.envs.tasks import Arithmetic
from penstock.envs.tools import WithTools
from penstock.errors import ConfigError
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Finished
from penstock.rollout.io.language_workload import LanguageWorkload, PreparedPrompt, chat_of
from penstock.rollout.settings import RolloutSection
from unit.envs.test_envs_chat import DROPPING, FAMILIES, tokenizer_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Asked(Arithmetic):
    """Sums, asked in a conversation or as a plain text."""

    def __init__(self, *, messages: bool) -> None:
        super().__init__()
        self._messages = messages

    def prompt(self, position: int) -> Prompt:
        answer = {"answer": "3"}
        if self._messages:
            return Prompt(messages=(Message("user", "What is 1 + 2?"),), columns=answer)
        return Prompt("What is 1 + 2?", columns=answer)


class Script:
    """An engine that says what it was told to say, and remembers what it read."""

    max_positions: int | None = None

    def __init__(self, *lines: Sequence[int]) -> None:
        self._lines = list(lines)
        self.read: list[list[int]] = []

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        self.read.append([*context])
        line = np.array(self._lines.pop(0), np.int32)
        spans = np.array([[0, 4]], np.int32)
        return Completion(line, np.full(len(line), -0.5, np.float32), spans, "stop", 4, "four")

    def forget(self, cache_key: object) -> None: ...

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...


def played(workload: LanguageWorkload) -> tuple[PreparedPrompt, Finished]:
    prepared = workload.prepare(PromptLease(PromptIndex(0), 0, (SampleId(0),), (0,), Version(4)))
    assert isinstance(prepared, PreparedPrompt)
    ((episode,),) = asyncio.run(workload.generate(workload.collate([prepared])))
    (outcome,) = workload.postprocess(prepared, [episode])  # type: ignore[misc]
    assert isinstance(outcome, Finished)
    return prepared, outcome


def chatml() -> PretrainedTokenizer:
    return PretrainedTokenizer(tokenizer_of(*FAMILIES["chatml"]))


def test_the_engine_reads_every_turn_as_the_template_writes_it() -> None:
    """The result of a tool stands in a turn of its own, and the policy speaks after its own header."""
    tokenizer = chatml()
    engine = Script(*(tokenizer.encode(f"{said}<|im_end|>") for said in (CALL, "3")))
    workload = LanguageWorkload(WithTools(Asked(messages=True), [add]), engine, tokenizer, RolloutSection(max_turns=5))
    prepared, outcome = played(workload)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages: list[Any] = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    written = [
        tokenizer.inner.apply_chat_template(messages[:count], tools=[add], tokenize=False, add_generation_prompt=True)
        for count in (1, 3)
    ]
    assert engine.read == [tokenizer.encode(text) for text in written]
    assert written[1].endswith("<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    trained = outcome.arrays["token_ids"][outcome.arrays["loss_mask"] != 0]
    assert tokenizer.inner.decode(trained.tolist()) == f"{CALL}<|im_end|>3<|im_end|>"
    assert prepared.token_ids == engine.read[0]


def test_what_the_template_leaves_out_of_a_prompt_is_an_error_before_anything_is_trained() -> None:
    class Instructed(Asked):
        def prompt(self, position: int) -> Prompt:
            return Prompt(messages=(Message("system", "Be brief."), *super().prompt(position).messages))

    tokenizer = PretrainedTokenizer(tokenizer_of(DROPPING, [], "", "|"))
    LanguageWorkload(Asked(messages=True), Script(), tokenizer).preflight()
    with pytest.raises(ConfigError, match=r"leaves out the content of message 0 \(role 'system'\)"):
        LanguageWorkload(Instructed(messages=True), Script(), tokenizer).preflight()


def test_every_tool_call_of_a_conversation_has_its_own_id() -> None:
    environment = WithTools(Asked(messages=True), [add])
    prompt = environment.prompt(0)
    first, second = (environment.reply(prompt, [CALL] * turns) for turns in (1, 2))
    replies: Any = [first, second]
    assert [one.tool_call_id for reply in replies for one in reply] == ["call00000", "call00001"]
    inner = chatml().inner
    chat = chat_of(PretrainedTokenizer(inner), environment)
    assert chat is not None
    messages = chat.conversation(prompt.shown(), [CALL, CALL], [])  # type: ignore[arg-type]
    assert [message["tool_calls"][0]["id"] for message in messages[1:]] == ["call00000", "call00001"]


def plain(a: int, unit: str = "m", more: list[int] | None = None) -> int:
    """The length of a thing."""
    return a


def untyped(word, times=2):  # type: ignore[no-untyped-def]
    return word * times


def described(a: int) -> int:
    """Twice a number.

    Args:
        a: The number.
    """
    return 2 * a


def test_a_template_shows_tools_with_any_docstring() -> None:
    tools: list[Callable[..., Any]] = [plain, untyped, described]
    workload = LanguageWorkload(WithTools(Asked(messages=True), tools), Script(), chatml(), RolloutSection(max_turns=2))
    workload.preflight()
    assert workload.chat is not None
    first, second, third = workload.chat.tools
    assert first["function"]["description"] == "The length of a thing."
    assert first["function"]["parameters"]["properties"] == {
        "a": {"type": "integer"},
        "unit": {"type": "string", "default": "m"},
        "more": {"anyOf": [{"items": {"type": "integer"}, "type": "array"}, {"type": "null"}], "default": None},
    }
    assert first["function"]["parameters"]["required"] == ["a"]
    assert [*second["function"]["parameters"]["properties"]] == ["word", "times"]
    assert third["function"]["parameters"]["properties"] == {"a": {"type": "integer", "description": "The number."}}


def test_a_completion_ends_at_the_tokens_of_tokenizer_template_model_and_user(tmp_path: Path) -> None:
    """A model that ends its turns with another token than the end of sequence ran to the limit."""
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>", "<other>", "<stop>"]
    inner = tokenizer_of(FAMILIES["gemma"][0], special, "<bos>", "<eos>")
    ids: dict[str, Any] = {word: inner.convert_tokens_to_ids(word) for word in special}
    inner.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<eos>"], ids["<other>"]]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.stop_ids == (ids["<eos>"], ids["<other>"])
    settings = RolloutSection(stop_ids=[ids["<stop>"]])
    workload = LanguageWorkload(Asked(messages=True), Script(), tokenizer, settings)
    assert set(workload.sampling.stop_ids) == {ids[word] for word in ("<eos>", "<other>", "<stop>", "<end_of_turn>")}


@pytest.mark.parametrize(("written", "expected"), [({"eos_token_id": 5}, [5]), ({"eos_token_id": None}, []), ({}, [])])
def test_the_models_own_stop_tokens_are_one_several_or_none(
    tmp_path: Path, written: dict[str, Any], expected: list[int]
) -> None:
    inner = tokenizer_of(*FAMILIES["chatml"])
    inner.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert load_tokenizer(tmp_path).stop_ids == (inner.eos_token_id, *expected)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match="damaged"):
        load_tokenizer(tmp_path)


def test_what_was_drawn_after_a_stop_string_is_dropped() -> None:
    tokenizer = chatml()
    engine = Script(tokenizer.encode("is 3. is"))
    workload = LanguageWorkload(Asked(messages=False), engine, tokenizer, RolloutSection(stop_strings=["3."]))
    _, outcome = played(workload)
    assert tokenizer.decode(outcome.arrays["token_ids"][outcome.arrays["loss_mask"] != 0].tolist()) == "is 3."
    assert not outcome.arrays["truncated"][0]


@pytest.mark.parametrize("used", [True, False])
def test_a_plain_text_begins_as_the_tokenizer_begins_texts(used: bool) -> None:
    """Base models were trained with a token before every text; a chat template writes its own."""
    inner = tokenizer_of(*FAMILIES["llama"])
    bos: Any = inner.bos_token_id
    if used:
        inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
        )
    tokenizer = PretrainedTokenizer(inner)
    assert tokenizer.bos_ids == ((bos,) if used else ())
    for messages in (False, True):
        workload = LanguageWorkload(Asked(messages=messages), Script(), tokenizer)
        prepared = workload.prepare(PromptLease(PromptIndex(0), 0, (SampleId(0),), (0,), Version(4)))
        assert isinstance(prepared, PreparedPrompt)
        assert prepared.token_ids.count(bos) == int(used or messages)
        assert (prepared.token_ids[0] == bos) is (used or messages)
