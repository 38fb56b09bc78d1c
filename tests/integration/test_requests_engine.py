"""The request engine with its thread: bounds, cancellation, interruption, weights, sleeps in mid-flight, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection
from penstock.errors import ConfigError, PeerLost

T = TypeVar("T")

DEADLINE_S = 60.0
SHORT = Sampling(max_new_tokens=4, greedy=True)
ENDLESS = Sampling(max_new_tokens=4000)


def tiny_model() -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


class Steps:
    """Runs something after a given decode step, on the engine's own thread, and lets a test wait for a step."""

    def __init__(self) -> None:
        self.taken = 0
        self.then: dict[int, Callable[[], Any]] = {}

    def __call__(self) -> None:
        self.taken += 1
        self.then.get(self.taken, lambda: None)()


def engine_with(
    steps: Callable[[], None] = lambda: None, *, version: int = 0, digest: str = "", **options: Any
) -> TorchEngine:
    settings = TorchEngineSection(**{"cache_tokens": 40_000, **options})
    return TorchEngine(tiny_model(), settings, pad_id=0, progressed=steps, version=version, digest=digest)


async def within(work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(DEADLINE_S):
        return await work


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the engine's thread sets no event of ours
            await asyncio.sleep(0.002)


async def _all(calls: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    return list(await asyncio.gather(*calls))


async def at_once(engine: TorchEngine, calls: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """All of them are there before the first step is taken."""
    await asyncio.to_thread(engine.sleep)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.wake)
    return [task.result() for task in tasks]


async def test_more_requests_than_rows_all_end_and_never_exceed_the_bounds() -> None:
    seen: list[float] = []
    engine = engine_with(lambda: seen.append(engine.statistics()["requests_decoding"]), rows=3, cache_tokens=3 * 20)
    alone = TorchEngine(engine.model, pad_id=0)
    contexts = [[1 + position % 9] * (1 + position % 7) for position in range(20)]
    calls = [engine.complete(context, Sampling(max_new_tokens=1 + len(context), greedy=True)) for context in contexts]
    for context, completion in zip(contexts, await within(_all(calls)), strict=True):
        [expected] = alone.generate([context], Sampling(max_new_tokens=1 + len(context), greedy=True))
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
    assert max(seen) == 3
    assert engine.statistics()["requests_waiting"] == 0


async def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    engine = engine_with(rows=2)
    async with asyncio.TaskGroup() as group:
        endless = group.create_task(engine.complete([1], ENDLESS))
        for _ in range(5):
            await within(engine.complete([2], SHORT))
        assert not endless.done()
        endless.cancel()


async def test_a_cancelled_request_frees_its_row_for_the_next() -> None:
    engine = engine_with(rows=1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(engine.complete([1], ENDLESS))
        waiting = group.create_task(engine.complete([2], ENDLESS))
        last = group.create_task(engine.complete([3], SHORT))
        await until(lambda: engine.statistics()["requests_waiting"] == 2)
        waiting.cancel()
        first.cancel()
        assert len((await within(_one(last))).token_ids) == 4
    await until(lambda: engine._thread is None)  # nothing in flight: no thread
    assert engine.statistics()["requests_decoding"] == 0


async def _one(task: asyncio.Task[Completion]) -> Completion:
    return await task


async def test_an_interruption_ends_every_request_with_its_tokens_until_resumed() -> None:
    steps = Steps()
    engine = engine_with(steps, rows=2)
    steps.then[3] = engine.interrupt
    calls = [engine.complete([context], ENDLESS) for context in (1, 2, 3)]
    completions = await at_once(engine, calls)
    assert [(len(one.token_ids), one.ending) for one in completions] == [
        (3, "interrupted"),
        (3, "interrupted"),
        (0, "interrupted"),
    ]
    assert (await within(engine.complete([1], SHORT))).ending == "interrupted", "also what comes later"
    engine.resume()
    assert (await within(engine.complete([1], SHORT))).ending == "length"


async def test_weights_swap_between_two_steps_for_all_rows_at_once() -> None:
    steps = Steps()
    engine = engine_with(steps, version=6, digest="six")
    engine.stage({name: tensor * 0.5 for name, tensor in engine.served_tensors().items()})
    steps.then[2] = lambda: engine.swap(7, "seven")
    first, second = await at_once(engine, [engine.complete([1], SHORT), engine.complete([2, 3], SHORT)])
    for completion in (first, second):
        assert completion.versions.tolist() == [[0, 6], [2, 7]]
        assert (completion.version, completion.digest) == (6, "six")
    steps.then[steps.taken + 1] = lambda: engine.load_in_place(engine.served_tensors(), 8, "eight")
    assert (await within(engine.complete([1], SHORT))).versions.tolist() == [[0, 7], [1, 8]]


async def test_a_sleep_drops_all_caches_and_requests_go_on_from_their_tokens() -> None:
    steps = Steps()
    engine = engine_with(steps)
    slept = threading.Event()

    def sleep() -> None:
        engine.sleep()
        slept.set()

    [expected] = TorchEngine(engine.model, pad_id=0).generate([[1, 2]], Sampling(max_new_tokens=30, greedy=True))
    first = await within(engine.complete([5], SHORT, cache_key="kept"))
    assert engine.statistics()["conversations_kept"] == 1
    steps.then[steps.taken + 10] = sleep
    async with asyncio.TaskGroup() as group:
        going = group.create_task(engine.complete([1, 2], Sampling(max_new_tokens=30, greedy=True)))
        await until(slept.is_set)
        assert engine.statistics()["conversations_kept"] == 0
        assert engine._rows._cache.shape == (0, 0)
        joined = group.create_task(engine.complete([*[5], *first.token_ids, 6], SHORT, cache_key="kept"))
        assert not going.done()
        await asyncio.to_thread(engine.wake)
        assert (await within(_one(going))).token_ids.tolist() == expected.token_ids.tolist()
        assert len((await within(_one(joined))).token_ids) == 4


async def test_conversations_are_kept_between_turns_within_bounds() -> None:
    engine = engine_with(kept_tokens=20)
    alone = TorchEngine(engine.model, pad_id=0)

    async def turn(key: object, context: list[int]) -> tuple[list[int], float]:
        before = engine.statistics()["read_tokens"]
        completion = await within(engine.complete(context, SHORT, cache_key=key))
        [expected] = alone.generate([context], SHORT)
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        return [*context, *completion.token_ids.tolist()], engine.statistics()["read_tokens"] - before

    one, read = await turn("one", [1, 2, 3, 4, 5])
    assert read == 5
    one, read = await turn("one", [*one, 7])
    assert read == 2, "the last token drawn, and the new one"
    two, _ = await turn("two", [3] * 9)  # 12 of its tokens are kept: no room for the other any more
    assert engine.statistics()["conversations_kept"] == 1
    _, read = await turn("two", [*two, 7])
    assert read == 2
    one, read = await turn("one", [*one, 7])
    assert read == len(one) - 4, "evicted, so it was read again"
    engine.forget("one")
    engine.forget("never heard of")
    await until(lambda: engine.statistics()["conversations_kept"] == 0)


async def test_a_failing_step_fails_every_request_now_and_later_with_its_error() -> None:
    steps = Steps()
    engine = engine_with(steps, rows=1)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device fell off the bus")

    steps.then[2] = lambda: engine.model.register_forward_pre_hook(fail, with_kwargs=True)
    calls = [engine.complete([context], ENDLESS) for context in (1, 2)]
    results = await within(_gathered(calls))
    for result in results:
        assert isinstance(result, PeerLost)
        assert "the device fell off the bus" in str(result)
        assert isinstance(result.__cause__, RuntimeError)
    with pytest.raises(PeerLost, match="fell off the bus"):
        await engine.complete([1], SHORT)


async def test_requests_fail_also_when_the_cache_cannot_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a rank that ended: dropping the cache would need it."""
    steps = Steps()
    engine = engine_with(steps, rows=1)
    dropped: list[str] = []

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a collective failed")

    def lost() -> None:
        dropped.append("tried")
        raise PeerLost("a rank of the engine has ended")

    monkeypatch.setattr(engine._rows, "drop_cache", lost)
    steps.then[2] = lambda: engine.model.register_forward_pre_hook(fail, with_kwargs=True)
    [result] = await within(_gathered([engine.complete([1], ENDLESS)]))
    assert isinstance(result, PeerLost)
    assert "a collective failed" in str(result)
    await until(lambda: dropped == ["tried"])


async def test_a_request_that_is_cancelled_during_a_sleep_leaves_the_others_alone() -> None:
    steps = Steps()
    engine = engine_with(steps, rows=4)
    calls = [asyncio.create_task(engine.complete([context], ENDLESS)) for context in (1, 2)]
    others = [asyncio.create_task(engine.complete([context], Sampling(max_new_tokens=60))) for context in (3, 4)]
    await until(lambda: steps.taken > 3)
    await engine.vacate(DEADLINE_S)
    assert not any(task.done() for task in others)
    for task in calls:
        task.cancel()
    await asyncio.wait(calls)
    await engine.occupy((), DEADLINE_S)
    assert [len((await within(_result(task))).token_ids) for task in others] == [60, 60]
    assert len((await within(engine.complete([5], SHORT))).token_ids) == 4


async def _result(task: asyncio.Task[Completion]) -> Completion:
    return await task


async def _gathered(calls: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion | BaseException]:
    return list(await asyncio.gather(*calls, return_exceptions=True))


async def test_what_can_never_be_served_is_refused_at_once() -> None:
    engine = engine_with(cache_tokens=100)
    with pytest.raises(ConfigError, match="cache_tokens = 100"):
        await engine.complete([1] * 90, Sampling(max_new_tokens=20))
    with pytest.raises(ConfigError, match="exceed the model's 4096 positions"):
        await engine.complete([1], Sampling(max_new_tokens=5000))
    with pytest.raises(ConfigError, match="empty prompt"):
        await engine.complete([], SHORT)


async def test_sampled_tokens_have_the_logprobs_of_a_fresh_forward() -> None:
    engine = engine_with(rows=4)
    contexts = [[position % 12] * (1 + position % 5) for position in range(12)]
    sampling = Sampling(max_new_tokens=15, temperature=0.8, stop_ids=(3,))
    for context, drawn in zip(
        contexts, await within(_all([engine.complete(one, sampling) for one in contexts])), strict=True
    ):
        ids = torch.tensor([[*context, *drawn.token_ids.tolist()]])
        with torch.inference_mode():
            logprobs = torch.log_softmax(engine.model(input_ids=ids).logits[0] / 0.8, -1)[len(context) - 1 : -1]
        expected = logprobs.gather(-1, torch.from_numpy(drawn.token_ids).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-3)
        assert drawn.ending == ("stop" if drawn.token_ids[-1] == 3 else "length")
