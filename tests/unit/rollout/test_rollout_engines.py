"""The engines on a tiny model: right log-probabilities, exact versions, swaps between steps, sleeps without loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.policy import PolicyEngine
from penstock.engines.requests import Sampling
from penstock.engines.serving import Serving
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import ConfigError, LocalProtocolError, PeerLost


def tiny_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from uniform, so that a wrong context shows
    return model


def reference_logprobs(model: nn.Module, prompt: list[int], completion: np.ndarray, temperature: float) -> np.ndarray:
    ids = torch.tensor([[*prompt, *completion.tolist()]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.from_numpy(completion).long()[:, None])[:, 0].numpy()


def engine_with(on_step: Callable[[int], None] = lambda step: None, **options: Any) -> TorchEngine:
    steps = iter(range(10_000))
    return TorchEngine(tiny_model(), pad_id=0, progressed=lambda: on_step(next(steps)), **options)


def other_weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.5 for name, tensor in engine.served_tensors().items()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution_also_with_padding(temperature: float) -> None:
    engine = engine_with()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    sampling = Sampling(max_new_tokens=9, temperature=temperature, stop_ids=(2,))
    completions = engine.generate(prompts, sampling, repeats=[3, 2, 4])
    owners = [prompts[0]] * 3 + [prompts[1]] * 2 + [prompts[2]] * 4
    assert len(completions) == 9
    for prompt, completion in zip(owners, completions, strict=True):
        expected = reference_logprobs(engine.model, prompt, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)
        assert completion.logprobs.dtype == np.float32
        assert 2 not in completion.token_ids[:-1]
        assert completion.ending == ("stop" if completion.token_ids[-1] == 2 else "length")
        assert completion.ending == "stop" or len(completion.token_ids) == 9


@pytest.mark.parametrize(
    ("sampling", "probabilities"),
    [
        (Sampling(1), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(1, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1, top_k=9), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(1, top_p=0.69), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1, top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(1, top_p=1e-9), [1, 0, 0, 0]),
        (Sampling(1, min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(1, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1, top_k=2, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(1, temperature=0.5, top_k=2), [16 / 25, 9 / 25, 0, 0]),
    ],
)
def test_recorded_logprobs_are_those_of_the_truncated_distribution(
    sampling: Sampling, probabilities: list[float]
) -> None:
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[order.argsort()].expand(4000, 4) + 1.5
    tokens, logprobs = engine_with().sample(logits, sampling)
    expected = torch.tensor(probabilities, dtype=torch.float32)[order.argsort()]
    torch.testing.assert_close(logprobs.exp(), expected[tokens], atol=1e-5, rtol=0)
    drawn = torch.bincount(tokens[:, 0], minlength=4) / 4000
    torch.testing.assert_close(drawn, expected, atol=0.04, rtol=0)


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1000])
def test_every_token_is_drawn_as_often_as_it_is_probable(tokens: int) -> None:
    """Also at the ends of the blocks in which it is looked for; and what has no probability never is."""
    rng = np.random.default_rng(tokens)
    probabilities = torch.from_numpy(rng.dirichlet(np.full(tokens, 0.5)))
    probabilities[torch.from_numpy(rng.random(tokens) < 0.3)] = 0.0
    probabilities[-1] += 0.1
    probabilities /= probabilities.sum()
    draws = 20_000
    engine = engine_with()
    found = torch.zeros(tokens)
    for _ in range(4):
        logits = probabilities.log().float().repeat(draws // 4, 1)
        drawn, logprobs = engine.sample(logits, Sampling(max_new_tokens=1))
        torch.testing.assert_close(logprobs.exp(), probabilities[drawn].float(), atol=1e-5, rtol=1e-4)
        found += torch.bincount(drawn[:, 0], minlength=tokens)
    assert not found[probabilities == 0].any()
    expected = probabilities * draws
    common = expected >= 10
    distance = ((found - expected)[common] ** 2 / expected[common]).sum()
    freedom = int(common.sum())
    assert distance < freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_rows_use_no_random_numbers() -> None:
    engine = engine_with()
    before = engine.generator.get_state()
    engine.generate([[1, 2], [3]], Sampling(max_new_tokens=5, greedy=True), repeats=[2, 3])
    assert torch.equal(engine.generator.get_state(), before)


def test_rows_that_ended_leave_the_batch_and_the_rest_is_not_disturbed() -> None:
    engine = engine_with()
    completions = engine.generate([[1, 2], [3]], Sampling(max_new_tokens=30, stop_ids=(5,)), repeats=[20, 20])
    lengths = {len(completion.token_ids) for completion in completions}
    assert len(lengths) > 3, "the rows ended at different times"
    for prompt, completion in zip([[1, 2]] * 20 + [[3]] * 20, completions, strict=True):
        expected = reference_logprobs(engine.model, prompt, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=5e-4)


def test_greedy_takes_the_most_likely_token() -> None:
    engine = engine_with()
    first, second = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=6, greedy=True), repeats=[2])
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_a_swap_happens_between_two_steps_and_every_token_knows_its_version() -> None:
    pauses: list[float] = []

    def swap(step: int) -> None:
        if step == 2:
            pauses.append(engine.swap(7, "seven"))

    engine = engine_with(swap, version=6, digest="six")
    engine.stage(other_weights(engine))
    assert engine.version == 6, "staging changes nothing"
    before = {name: tensor.clone() for name, tensor in engine.served_tensors().items()}
    [completion] = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=6))
    assert completion.versions.tolist() == [[0, 6], [3, 7]]
    assert (completion.version, completion.digest) == (6, "six")
    assert (engine.version, engine.digest) == (7, "seven")
    assert all(torch.equal(engine.served_tensors()[name], tensor * 0.5) for name, tensor in before.items())
    assert len(pauses) == 1
    assert pauses[0] >= 0


def test_a_swap_from_another_thread_does_not_starve_behind_generation() -> None:
    swapped = threading.Event()

    def request(step: int) -> None:
        if step == 1:
            engine.stage(other_weights(engine))
            threading.Thread(target=lambda: (engine.swap(1, "one"), swapped.set()), daemon=True).start()
        if step > 1:
            assert swapped.wait(10), "the next step began before the waiting swap was done"

    engine = engine_with(request)
    completion = engine.generate([[1]], Sampling(max_new_tokens=20))[0]
    assert completion.versions[-1, 1] == 1


def test_load_in_place_overwrites_the_very_same_tensors() -> None:
    engine = engine_with()
    held = engine.served_tensors()
    weights = other_weights(engine)
    engine.load_in_place(weights, 3, "three")
    assert engine.version == 3
    assert all(torch.equal(held[name], weights[name]) for name in held)


def test_a_load_that_breaks_part_way_leaves_the_engine_torn_until_a_complete_version_is_in() -> None:
    class Breaking(dict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads += 1
            if self.reads > len(self) + 2:  # the check reads them all once
                raise OSError("the disk went away")
            return super().__getitem__(name)

    module = tiny_model()
    serving = Serving(module, version=1, digest="one", blocked_timeout_s=0.01)
    with pytest.raises(OSError, match="disk went away"):
        serving.load_in_place(Breaking(serving.served_tensors()), 2, "two")
    assert serving.state == "torn"
    with pytest.raises(PeerLost, match="torn"), serving.step():
        pass
    serving.load_in_place({name: tensor.clone() for name, tensor in serving.served_tensors().items()}, 3, "three")
    with serving.step() as served:
        assert served == (3, "three")


def test_sleep_drops_the_cache_and_the_tokens_go_on_after_waking() -> None:
    def nap(step: int) -> None:
        if step == 3:
            engine.sleep()
            threading.Timer(0.05, engine.wake).start()

    engine = engine_with(nap)
    for prompt, completion in zip(
        [[1, 2], [1, 2], [3, 4, 5]],
        engine.generate([[1, 2], [3, 4, 5]], Sampling(max_new_tokens=8), repeats=[2, 1]),
        strict=True,
    ):
        assert len(completion.token_ids) == 8
        expected = reference_logprobs(engine.model, prompt, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=5e-4)


def test_interrupt_returns_what_there_is() -> None:
    engine = engine_with(lambda step: engine.interrupt() if step == 2 else None)
    [completion] = engine.generate([[1, 2]], Sampling(max_new_tokens=8))
    assert (completion.ending, len(completion.token_ids)) == ("interrupted", 3)
    engine.resume()
    assert engine.generate([[1, 2]], Sampling(max_new_tokens=2))[0].ending == "length"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(next(iter(weights))), "lack 1 of the"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(16).double()}), "float64"),
    ],
)
def test_weights_of_another_model_are_refused_before_a_byte_is_touched(change: Any, message: str) -> None:
    engine = engine_with()
    weights = other_weights(engine)
    change(weights)
    for load in (engine.stage, lambda tensors: engine.load_in_place(tensors, 1, "")):
        with pytest.raises(LocalProtocolError, match=message):
            load(weights)
    assert engine.serving.state == "serving"


def test_a_swap_without_staged_weights_is_a_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="no weights are staged"):
        engine_with().swap(1, "")


def test_prompts_that_cannot_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="60 tokens and 5 new ones exceed the model's 64"):
        engine_with().generate([[1] * 60], Sampling(max_new_tokens=5))
    with pytest.raises(ConfigError, match="empty prompt"):
        engine_with().generate([[]], Sampling(1))


class TwoActions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.0, 3.0]))

    def act(
        self, observations: torch.Tensor, generator: torch.Generator, greedy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(self.bias.expand(len(observations), 2), -1)
        actions = torch.multinomial(logprobs.exp(), 1, generator=generator)
        return actions[:, 0], logprobs.gather(-1, actions)[:, 0]


def test_the_policy_engine_serves_and_swaps_like_the_other() -> None:
    engine = PolicyEngine(TwoActions(), version=1, digest="one")
    actions, logprobs, version, digest = engine.act(np.zeros((200, 4), dtype=np.float32))
    assert actions.mean() > 0.8
    assert logprobs.dtype == np.float32
    assert (version, digest) == (1, "one")
    engine.stage({"bias": torch.tensor([3.0, 0.0])})
    engine.swap(2, "two")
    actions, _, version, digest = engine.act(np.zeros((200, 4), dtype=np.float32))
    assert actions.mean() < 0.2
    assert (version, digest) == (2, "two")
