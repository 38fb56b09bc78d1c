"""A conversation that is taken back becomes one sample with branches, and what they share is trained once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.batch import codec
from penstock.batch.pack import PackSettings, TokenMicroBatch, pack
from penstock.engines.requests import Completion, Sampling
from penstock.envs.tasks import Arithmetic
from penstock.envs.tools import WithTools
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Finished
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.settings import RolloutSection

RIGHT = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
WRONG = '<tool_call>{"name": "sub"}</tool_call>'


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Characters:
    eos_id = 0
    stop_ids: tuple[int, ...] = (0,)
    bos_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Script:
    """An engine that says what it was told to say, and remembers what it read."""

    max_positions: int | None = None

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.read: list[str] = []

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        self.read.append(Characters().decode(context))
        line = np.array(Characters().encode(self._lines.pop(0)), np.int32)
        spans = np.array([[0, 4]], np.int32)
        return Completion(line, np.full(len(line), -0.5, np.float32), spans, "stop", 4, "four")

    def forget(self, cache_key: object) -> None: ...

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...


def test_a_mistaken_call_is_forgotten_by_the_context_but_trained() -> None:
    engine = Script(RIGHT, WRONG, "so: 3")
    environment = WithTools(Arithmetic(), [add], introduce=False, forget_mistakes=True)
    tokenizer: Any = Characters()
    workload = LanguageWorkload(environment, engine, tokenizer, RolloutSection(max_turns=5))
    prepared = workload.prepare(PromptLease(PromptIndex(0), 0, (SampleId(0),), (0,), Version(4)))
    ((episode,),) = asyncio.run(workload.generate(workload.collate([prepared])))  # type: ignore[list-item]
    (outcome,) = workload.postprocess(prepared, [episode])  # type: ignore[arg-type]
    assert isinstance(outcome, Finished)
    assert outcome.length == len(RIGHT + WRONG + "so: 3")

    prompt = engine.read[0]
    told = "<tool_result>error: there is no tool 'sub'; there are add</tool_result>"
    assert engine.read[1] == prompt + RIGHT + "<tool_result>3</tool_result>"
    assert engine.read[2] == engine.read[1] + told

    sample = codec.decode(bytes(codec.encode(outcome.arrays)))
    (batch,) = pack([sample], np.array([1.5]), PackSettings(layout="padded"))
    assert isinstance(batch, TokenMicroBatch)
    texts, trained = [], []
    for number in range(len(batch.advantages_N)):
        at = batch.sequences_RT == number
        texts.append(Characters().decode(batch.token_ids_RT[at].tolist()))
        trained.append(Characters().decode(batch.token_ids_RT[at & (batch.loss_mask_RT != 0)].tolist()))
    assert dict(zip(texts, trained, strict=True)) == {
        engine.read[1] + WRONG: RIGHT + WRONG,
        engine.read[2] + "so: 3": "so: 3",
    }
    assert batch.advantages_N.tolist() == [1.5, 1.5]
