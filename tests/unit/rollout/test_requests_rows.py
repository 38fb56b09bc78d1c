"""Rows that join and leave at any step draw what they would have drawn alone, and read no more than they must."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch import rows as request_rows
from penstock.engines.torch.cache import RowCache
from penstock.engines.torch.decoding import Decoding
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.rows import Row, Rows, SavedCache
from penstock.engines.torch.settings import TorchEngineSection
from penstock.errors import ConfigError

VOCABULARY = 12
GREEDY = Sampling(max_new_tokens=12, greedy=True)


def engine_of(seed: int = 0, **options: Any) -> TorchEngine:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from uniform, so that a wrong context shows
    return TorchEngine(model, pad_id=0, **options)


def other_weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.7 for name, tensor in engine.served_tensors().items()}


def fresh_logprobs(engine: TorchEngine, context: Sequence[int], completion: Completion) -> np.ndarray:
    ids = torch.tensor([[*context, *completion.token_ids.tolist()]])
    with torch.inference_mode():
        logits = engine.model(input_ids=ids).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(context) - 1 : -1]
    return logprobs.gather(-1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0].numpy()


class Bench:
    """Steps rows as an engine does, without its thread."""

    def __init__(self, engine: TorchEngine, rows: int = 8, tokens: int = 8 * 48, *, reread: bool = False) -> None:
        self.engine = engine
        cache = RowCache(engine.model, rows, tokens)
        self.rows = Rows(engine, cache, Decoding(engine.model, cache, graphs=False), reread=reread)
        self.longest = tokens // rows
        self.done: dict[int, Completion] = {}

    def seat(
        self, request: int, context: Sequence[int], sampling: Sampling = GREEDY, saved: SavedCache | None = None
    ) -> Row:
        row = Row(request, [*context], len(context), sampling)
        self.rows.make_room(len(self.rows.rows) + 1, self.longest)
        self.rows.seat(row, saved)
        return row

    def step(self) -> None:
        with torch.inference_mode():
            self.rows.make_room(len(self.rows.rows), self.longest)
            for row in self.rows.step(self.engine.version, self.engine.digest):
                self.done[row.request] = self.rows.completion(row)
                self.rows.leave(row)

    def run(self) -> dict[int, Completion]:
        while self.rows.rows:
            self.step()
        return self.done


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_join_at_random_steps_draw_what_they_draw_alone(seed: int) -> None:
    chance = random.Random(seed)
    engine = engine_of()
    bench = Bench(engine, rows=5, tokens=5 * 40)
    wanted = [
        (
            [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 7, 20]))],
            Sampling(max_new_tokens=chance.randint(1, 20), greedy=True, stop_ids=chance.choice([(), (3,)])),
        )
        for _ in range(25)
    ]
    line = list(enumerate(wanted))
    while line or bench.rows.rows:
        while line and len(bench.rows.rows) < 5 and chance.random() < 0.5:
            request, (context, sampling) = line.pop(0)
            bench.seat(request, context, sampling)
        if bench.rows.rows:
            bench.step()
    for request, (context, sampling) in enumerate(wanted):
        [alone] = engine.generate([context], sampling)
        together = bench.done[request]
        assert (together.token_ids.tolist(), together.ending) == (alone.token_ids.tolist(), alone.ending)
        np.testing.assert_allclose(together.logprobs, fresh_logprobs(engine, context, together), atol=1e-3)
        assert together.logprobs.dtype == np.float32


def test_rows_are_sampled_each_in_its_own_way() -> None:
    engine = engine_of()
    bench = Bench(engine)
    ways = [GREEDY, Sampling(max_new_tokens=12, temperature=0.5), Sampling(max_new_tokens=12, top_k=1), GREEDY]
    for request, sampling in enumerate(ways):
        bench.seat(request, [1, 2, 3], sampling)
    done = bench.run()
    assert done[0].token_ids.tolist() == done[2].token_ids.tolist() == done[3].token_ids.tolist()
    assert done[2].logprobs.tolist() == [0.0] * 12, "the only token left has all the probability"
    assert done[0].logprobs.max() < 0


def test_one_context_is_read_once_however_many_want_it() -> None:
    bench = Bench(engine_of())
    for request in range(6):
        bench.seat(request, [1, 2, 3, 4] if request % 2 else [5, 6, 7])
    bench.step()
    assert bench.rows.read_tokens == 4 + 3
    done = bench.run()
    assert len({tuple(done[request].token_ids) for request in (0, 2, 4)}) == 1
    assert len({tuple(done[request].token_ids) for request in (1, 3, 5)}) == 1


def test_long_contexts_are_read_in_parts_while_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_rows, "READ_TOKENS", 4)
    engine = engine_of()
    bench = Bench(engine)
    short = bench.seat(0, [1, 2])
    bench.step()
    longs = [[3] * 11, [4, 5, 6, 7, 8] * 2]
    for request, context in enumerate(longs, start=1):
        bench.seat(request, context)
    bench.step()
    assert len(short.logprobs) == 2, "it did not wait for the others' contexts"
    done = bench.run()
    for request, context in enumerate([[1, 2], *longs]):
        [alone] = engine.generate([context], GREEDY)
        assert done[request].token_ids.tolist() == alone.token_ids.tolist()


def test_a_dropped_cache_costs_a_second_reading_and_nothing_else() -> None:
    engine = engine_of()
    bench = Bench(engine)
    contexts = [[1, 2], [3, 4, 5], [3, 4, 5]]
    for request, context in enumerate(contexts):
        bench.seat(request, context)
    for _ in range(5):
        bench.step()
    bench.rows.drop_cache()
    done = bench.run()
    assert bench.rows.read_tokens == 2 + 3 + (2 + 5) + (3 + 5)
    for request, context in enumerate(contexts):
        [alone] = engine.generate([context], GREEDY)
        assert done[request].token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize("reread", [False, True])
def test_after_a_change_of_weights_tokens_say_so_and_contexts_are_read_again_if_wished(reread: bool) -> None:
    engine = engine_of(version=4, digest="four")
    bench = Bench(engine, reread=reread)
    bench.seat(0, [1, 2, 3])
    for _ in range(5):
        bench.step()
    engine.stage(other_weights(engine))
    engine.swap(5, "five")
    completion = bench.run()[0]
    assert completion.versions.tolist() == [[0, 4], [5, 5]]
    assert (completion.version, completion.digest) == (4, "four")
    assert bench.rows.read_tokens == (3 + 8 if reread else 3)
    apart = np.abs(completion.logprobs - fresh_logprobs(engine, [1, 2, 3], completion))[5:]
    assert (apart.max() < 1e-3) == reread, "only a context that was read again is that of the new weights"


@pytest.mark.parametrize("reread", [False, True])
def test_the_next_turn_reads_only_what_is_new(reread: bool) -> None:
    engine = engine_of(version=1)
    bench = Bench(engine, reread=reread)
    first = bench.seat(0, [1, 2, 3])
    while first.ending is None:
        with torch.inference_mode():
            bench.rows.step(1, "")
    saved = bench.rows.save(first)
    assert saved.tokens == first.tokens[:-1], "the last token was drawn and never read"
    bench.rows.leave(first)
    reply = [7, 8]
    before = bench.rows.read_tokens
    bench.seat(1, [*first.tokens, *reply], saved=saved)
    bench.seat(2, [*first.tokens[:8], 9, 9], saved=saved)  # the environment took the conversation back
    done = bench.run()
    assert bench.rows.read_tokens - before == 1 + len(reply) + 2
    for request, context in ((1, [*first.tokens, *reply]), (2, [*first.tokens[:8], 9, 9])):
        [alone] = engine.generate([context], GREEDY)
        assert done[request].token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(done[request].logprobs, fresh_logprobs(engine, context, done[request]), atol=1e-3)
    engine.stage(other_weights(engine))
    engine.swap(2, "two")
    before = bench.rows.read_tokens
    row = bench.seat(3, [*first.tokens, *reply], saved=saved)
    assert (row.cached == 0) == reread
    bench.run()


def test_the_cache_never_holds_more_than_its_tokens() -> None:
    chance = random.Random(5)
    bench = Bench(engine_of(), rows=6, tokens=100)
    cache = bench.rows._cache
    for request in range(60):
        need = chance.choice([5, 10, 40, 50])
        bench.longest = max([need, *(len(row.tokens) + row.sampling.max_new_tokens for row in bench.rows.rows)])
        while bench.rows.rows and (len(bench.rows.rows) + 1) * bench.longest > 100:
            bench.rows.leave(chance.choice(bench.rows.rows))
        bench.seat(request, [1] * (need - 2), Sampling(max_new_tokens=2))
        bench.step()
        assert cache.shape[0] * cache.shape[1] <= 100
        assert cache.shape[0] <= 6
    bench.rows.drop_cache()
    assert cache.shape == (0, 0)


def test_a_long_row_has_room_although_places_are_free_in_between() -> None:
    engine = engine_of()
    bench = Bench(engine, rows=16, tokens=14 * 60)
    bench.longest = 40
    contexts = [[chosen % VOCABULARY, 2, 3] for chosen in range(16)]
    rows = [bench.seat(request, context) for request, context in enumerate(contexts)]
    bench.step()
    for row in rows[:3]:
        bench.rows.leave(row)
    bench.longest = 60
    contexts.append([index % VOCABULARY for index in range(30)])
    bench.seat(16, contexts[16], Sampling(max_new_tokens=30, greedy=True))
    assert bench.rows._cache.shape[1] >= 60
    done = bench.run()
    for request in range(3, 17):
        [alone] = engine.generate([contexts[request]], GREEDY if request < 16 else Sampling(30, greedy=True))
        assert done[request].token_ids.tolist() == alone.token_ids.tolist()
        fresh = fresh_logprobs(engine, contexts[request], done[request])
        np.testing.assert_allclose(done[request].logprobs, fresh, atol=1e-3)


def test_rows_can_leave_while_the_cache_is_dropped() -> None:
    engine = engine_of()
    bench = Bench(engine)
    contexts = [[1, 2], [3, 4, 5], [6, 7], [8, 9, 1]]
    rows = [bench.seat(request, context) for request, context in enumerate(contexts)]
    bench.step()
    bench.rows.drop_cache()
    for row in rows[:2]:
        bench.rows.leave(row)
    done = bench.run()
    for request in (2, 3):
        [alone] = engine.generate([contexts[request]], GREEDY)
        assert done[request].token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize("window", [4, None])
def test_a_model_that_looks_back_only_so_far_draws_what_it_draws_by_itself(window: int | None) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=window,
    )
    model: Any = MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    bench = Bench(TorchEngine(model, pad_id=0))
    contexts = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [3, 3, 3]]
    for request, context in enumerate(contexts):
        bench.seat(request, context)
    done = bench.run()
    for request, context in enumerate(contexts):
        np.testing.assert_allclose(
            done[request].logprobs, fresh_logprobs(bench.engine, context, done[request]), atol=1e-3
        )


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))


def hybrid() -> Any:
    config = Lfm2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    return Lfm2ForCausalLM(config)


@pytest.mark.parametrize("model", [mamba, hybrid])
def test_a_model_without_keys_and_values_in_all_layers_is_refused(model: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="serve it with vLLM"):
        TorchEngine(model(), pad_id=0)


def longrope() -> Any:
    """Beyond 100 positions in a batch all its rows are encoded by the long factors."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=400,
        original_max_position_embeddings=100,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_scaling=scaling,  # type: ignore[arg-type]
    )
    return Phi3ForCausalLM(config)


def learned() -> Any:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=100, n_embd=16, n_layer=2, n_head=2, bos_token_id=1)
    config.eos_token_id = 2
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("model", [longrope, learned])
def test_free_places_do_not_change_the_positions_of_rows(model: Callable[[], Any]) -> None:
    """They are parked in the last column, which is beyond the model's positions here."""
    torch.manual_seed(0)
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    engine = TorchEngine(made, TorchEngineSection(rows=8, cache_tokens=8 * 128), pad_id=0)
    contexts = [[1, 2, 3 + row % 8, row % 5] for row in range(32)]  # those that take the places of others wait there
    done = engine.generate(contexts, Sampling(max_new_tokens=90, stop_ids=(5, 6)))
    assert engine._rows._cache.shape[1] > 100
    for context, completion in zip(contexts, done, strict=True):
        np.testing.assert_allclose(completion.logprobs, fresh_logprobs(engine, context, completion), atol=1e-3)
    assert engine.max_positions == 100
    with pytest.raises(ConfigError, match="exceed the model's 100 positions"):
        engine.generate([[1] * 20], Sampling(max_new_tokens=90))
