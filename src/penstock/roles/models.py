"""From the user's configuration to policies and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from penstock.batch.pack import MICRO_BATCH_TOKENS
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.engines.hub import directory_of
from penstock.engines.models import (
    ActorCriticPolicy,
    AdaptedPolicy,
    GymnasiumPolicy,
    LanguagePolicy,
    ModelSpec,
    PretrainedLanguageModel,
    TinyLanguageModel,
    adapt,
    build,
)
from penstock.engines.settings import HubModel, MlpModel, PathModel, TinyModel
from penstock.runtime.tensors import device_of
from penstock.train.objectives import EpisodeObjective, Objective, TokenObjective
from penstock.train.sharding import ShardedPolicy
from penstock.train.support import check_trained


def policy_of(config: Config, pipeline: PipelineSection, environment: Any) -> LanguagePolicy | ActorCriticPolicy:
    """The initial policy in host memory: equal weights in every process."""
    policy = build(_spec(config, pipeline, environment))
    if pipeline.lora is None or not isinstance(policy, LanguagePolicy):
        return policy
    return adapt(policy, pipeline.lora, seed=config.run.seed)


def _spec(config: Config, pipeline: PipelineSection, environment: Any) -> ModelSpec:
    match pipeline.model:
        case TinyModel(hidden=hidden, layers=layers, heads=heads, max_length=max_length):
            alphabet = getattr(environment, "alphabet", None)
            options = {} if alphabet is None else {"alphabet": alphabet}
            return TinyLanguageModel(
                hidden_size=hidden,
                layers=layers,
                heads=heads,
                max_positions=max_length,
                seed=config.run.seed,
                **options,
            )
        case HubModel(dtype=dtype) | PathModel(dtype=dtype) as model:
            if dtype == "auto":
                dtype = _default_dtype(pipeline)
            path = directory_of(model) if isinstance(model, HubModel) else model.path
            gguf_file = "" if isinstance(model, HubModel) else model.gguf_file
            return PretrainedLanguageModel(path=str(path), gguf_file=gguf_file or None, dtype=dtype)
        case MlpModel() as model:
            return GymnasiumPolicy(
                observation_shape=environment.spaces.observation_shape,
                action_kind=environment.spaces.action_kind,
                action_size=environment.spaces.action_size,
                hidden_size=model.hidden,
                normalize_observations=model.normalize_observations,
                normalize_rewards=model.normalize_rewards,
                seed=config.run.seed,
            )


def _default_dtype(pipeline: PipelineSection) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if _on_gpu(pipeline) else "float32"


def _on_gpu(pipeline: PipelineSection) -> bool:
    return device_of(pipeline.train.device).type == "cuda"


def _teacher_of(pipeline: PipelineSection) -> LanguagePolicy | None:
    if pipeline.train.teacher is None:
        return None
    teacher = build(PretrainedLanguageModel(path=str(pipeline.train.teacher), dtype=_default_dtype(pipeline)))
    assert isinstance(teacher, LanguagePolicy)
    return teacher


def recomputes_activations(pipeline: PipelineSection) -> bool:
    """Whether activations are recomputed from the start, which leaves memory for longer passes.

    By default where running out of memory could not be handled: a sharded model cannot repeat a step.
    """
    chosen = pipeline.train.activation_checkpointing
    if chosen is not None:
        return chosen
    sharded = pipeline.train_ranks > 1 or pipeline.train.fsdp
    return sharded and isinstance(pipeline.model, HubModel | PathModel) and _on_gpu(pipeline)


def micro_batch_tokens(pipeline: PipelineSection) -> int:
    default = MICRO_BATCH_TOKENS * (4 if recomputes_activations(pipeline) else 1)
    return pipeline.train.tokens_per_micro_batch or default


def objective_of(
    config: Config,
    pipeline: PipelineSection,
    environment: Any,
    sharded: Callable[[LanguagePolicy, bool], LanguagePolicy] | None = None,
) -> Objective:
    """The initial policy with its loss. `sharded` shards a policy, trained or not, over the ranks."""
    policy = policy_of(config, pipeline, environment)
    if isinstance(pipeline.model, MlpModel):
        return EpisodeObjective(policy, pipeline.ppo_loss)
    check_trained(policy.module.config)
    if recomputes_activations(pipeline) and isinstance(policy, LanguagePolicy):
        policy.checkpoint_activations()
    trained, reference, teacher = policy, None, _teacher_of(pipeline)
    if sharded is not None:
        assert isinstance(policy, LanguagePolicy)
        trained = sharded(policy, True)
        teacher = None if teacher is None else sharded(teacher, False)
    if pipeline.token_loss.kl_coefficient and isinstance(policy, AdaptedPolicy):
        assert isinstance(trained, AdaptedPolicy | ShardedPolicy)
        reference = trained.base()
    elif pipeline.token_loss.kl_coefficient:
        reference = policy_of(config, pipeline, environment)
        assert isinstance(reference, LanguagePolicy)
        reference = reference if sharded is None else sharded(reference, False)
    return TokenObjective(
        trained,
        pipeline.token_loss,
        loss=pipeline.train.loss,
        temperature=pipeline.rollout.temperature,
        longest=pipeline.rollout.max_new_tokens,
        packing=pipeline.train.packing,
        may_recompute=pipeline.train.activation_checkpointing is None,
        reference=reference,
        teacher=teacher,
        cut=pipeline.rollout.top_k is not None or pipeline.rollout.top_p < 1 or pipeline.rollout.min_p > 0,
    )
