"""After the run: its checkpoints as models to export, to evaluate and to sample from. One process, no controller."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import nn
from transformers.utils import logging as transformers_logging

from penstock.config.load import dump, load, validate
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.engines.build import build_engine
from penstock.engines.models import ActorCriticPolicy, AdaptedPolicy, LanguagePolicy
from penstock.engines.protocol import Site
from penstock.engines.registry import SECTIONS
from penstock.engines.requests import Completion, Sampling
from penstock.engines.section import EngineSection
from penstock.engines.settings import HubModel, MlpModel, PathModel, TinyModel
from penstock.engines.tokenizer import load_tokenizer
from penstock.envs.protocol import DividedEnvironment
from penstock.errors import ConfigError, RunFailed
from penstock.records.ids import MemberId, PipelineName, PromptIndex, RunId, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.roles.environments import environment_of, evaluation_environment_of
from penstock.roles.models import policy_of
from penstock.rollout.hooks import Failed, Unusable
from penstock.rollout.io.workloads import close_workload, workload_of
from penstock.rollout.settings import RolloutSection
from penstock.runtime.member import RunMember
from penstock.runtime.rundir import RunDir
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_at
from penstock.train import checkpoint
from penstock.train.best import BEST

Z_95 = 1.96
OCCUPY_S = 600.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A policy on disk: a checkpoint of a run, or the directory of a model."""

    config: Config
    pipeline: PipelineSection
    directory: Path
    step: int | None
    """None: the directory of a model."""

    @property
    def title(self) -> str:
        if served := self.pipeline.engine.serves:
            return f"{served}, with the tokenizer of {self.directory}"
        return str(self.directory) if self.step is None else f"{self.directory} (step {self.step})"


def to_evaluate(
    path: Path,
    *,
    pipeline: str | None = None,
    step: str = "",
    env: dict[str, Any] | None = None,
    trusts: bool = False,
) -> Saved:
    """The same as `saved`. Raises `ConfigError` if code that another user's run names would evaluate it."""
    if (path / "run.json").exists():
        run = RunDir.open(path)
        if env is None:
            run.require_own(trusts, "evaluating it runs its environment (or name another one with --env)")
        elif _pipeline(load(run.config_path), pipeline).rollout.workload is not None:
            run.require_own(trusts, "evaluating it runs its workload")
    return saved(path, pipeline=pipeline, step=step, env=env, trusts=trusts)


def saved(
    path: Path,
    *,
    pipeline: str | None = None,
    step: str = "",
    env: dict[str, Any] | None = None,
    trusts: bool = False,
) -> Saved:
    """The checkpoint of a run directory (`step`: a number, `best`, or empty for the last), or a model directory.

    Of a run that another user made, unless this one `trusts` it, nothing is imported and no link is followed.
    """
    if (path / "run.json").exists():
        run = RunDir.open(path)
        config = load(run.config_path)
        section = _pipeline(config, pipeline)
        if not (trusts or run.is_own):
            run.check(*run.checkpoints(section.name).rglob("*"), run.checkpoints(section.name))
            config = _without_code(config)
            section = _pipeline(config, section.name)
        if env is not None:
            tree = tomllib.loads(dump(config))
            raw = tree["pipeline"][config.pipeline.index(section)]
            raw["evaluation"] |= {"env": env, "every_steps": section.evaluation.every_steps or 1}
            config = validate(tree | {"pipeline": [raw]})
            section = config.pipeline[0]
        directory = _directory(run.checkpoints(section.name), step)
        found = json.loads((directory / checkpoint.RECORD_FILE).read_text(encoding="utf-8"))
        return Saved(config, section, directory, int(found["step"]))
    if not (path / "config.json").exists():
        raise ConfigError(f"{path} is neither a run directory (run.json) nor a model (config.json)")
    model = {"kind": "path", "path": str(path)}
    tree = {"name": "eval", "steps": 1, "env": env or {"name": "copy"}, "model": model}
    config = validate({"pipeline": [tree | {"evaluation": {"every_steps": 1, "env": env or {"name": "copy"}}}]})
    return Saved(config, config.pipeline[0], path, None)


def _without_code(config: Config) -> Config:
    """The configuration without directories to import from, and without engines that connect to servers."""
    offline = PipelineSection.model_fields["engine"].default
    pipelines = [
        section if section.engine.kind == offline.kind else section.model_copy(update={"engine": offline})
        for section in config.pipeline
    ]
    run = config.run.model_copy(update={"extra_path": []})
    return config.model_copy(update={"run": run, "pipeline": pipelines})


def replaced(one: Saved, rollout: RolloutSection) -> Saved:
    """The same with other settings of the rollout."""
    return replace(one, pipeline=one.pipeline.model_copy(update={"rollout": rollout}))


def served_by(one: Saved, table: Mapping[str, Any]) -> Saved:
    """The same with another engine, also one that no pipeline can train with."""
    kind = table.get("kind", "")
    if kind not in SECTIONS:
        raise ConfigError(f"--engine kind={kind} is unknown: choose {', '.join(SECTIONS)}")
    try:
        section = SECTIONS[kind].model_validate(table)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, bad['loc']))}: {bad['msg']}" for bad in error.errors(include_url=False)]
        raise ConfigError(f"--engine of kind {kind!r}: {'; '.join(found)}") from None
    if section.capabilities.weights == "files":
        raise ConfigError(
            f"an engine of kind {kind!r} reads the versions that a run publishes: it evaluates only during a run"
        )
    return replace(one, pipeline=one.pipeline.model_copy(update={"engine": section}))


def _pipeline(config: Config, name: str | None) -> PipelineSection:
    names = [section.name for section in config.pipeline]
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        raise ConfigError(f"choose a pipeline: --pipeline {' or --pipeline '.join(names)}")
    return config.pipeline[names.index(name)]


def _directory(checkpoints: Path, step: str) -> Path:
    available = sorted(checkpoints.glob("step-*")) + ([checkpoints / BEST] if (checkpoints / BEST).exists() else [])
    if not available:
        raise ConfigError(f"there is no checkpoint in {checkpoints} yet")
    if not step:
        found = checkpoint.latest(checkpoints)
        if found is None:
            raise ConfigError(f"all checkpoints in {checkpoints} are damaged")
        return found.directory
    chosen = BEST if step == BEST else f"step-{int(step):08d}" if step.isdecimal() else ""
    if checkpoints / chosen not in available or not chosen:
        kept = ", ".join(one.name.removeprefix("step-").lstrip("0") or "0" for one in available)
        raise ConfigError(f"there is no checkpoint of step {step!r} in {checkpoints}; found {kept}")
    return checkpoint.verify(checkpoints / chosen).directory


def export(one: Saved, to: Path, *, merged: bool = False) -> Path:
    """Writes a directory that transformers can load: configuration, tokenizer and weights, without training state.

    For a run with an adapter it has the adapter only, which peft can load, unless `merged`.
    """
    if one.pipeline.kind != "language":
        raise ConfigError(f"pipeline {one.pipeline.name!r} has a gymnasium policy, which transformers cannot load")
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to} exists and is not empty: choose another directory with --to")
    if one.pipeline.lora is not None:
        return _export_adapted(one, to, merged=merged)
    checkpoint.export(one.directory, to)
    return to


def _export_adapted(one: Saved, to: Path, *, merged: bool) -> Path:
    model = one.pipeline.model
    if isinstance(model, TinyModel) and not merged:
        raise ConfigError("the base of this adapter is a tiny model, which is in no directory: export with --merged")
    policy = policy_at(one)
    assert isinstance(policy, AdaptedPolicy)
    to.mkdir(parents=True, exist_ok=True)
    if merged:
        transformers_logging.disable_progress_bar()
        policy.save_merged(to)
    else:
        assert isinstance(model, HubModel | PathModel)
        policy.save_adapter(to, model.name if isinstance(model, HubModel) else str(model.path.absolute()))
    return to


def policy_at(one: Saved, environment: Any = None) -> LanguagePolicy | ActorCriticPolicy:
    """The policy of the checkpoint, in host memory; only its tokenizer if the engine loads no weights.

    A language model needs no environment: the alphabet of a tiny one is saved with it.
    """
    if isinstance(one.pipeline.model, TinyModel) and one.step is not None:
        environment = load_tokenizer(one.directory)
    if one.pipeline.engine.capabilities.weights == "none":
        return LanguagePolicy(nn.Identity(), load_tokenizer(one.directory))
    policy = policy_of(one.config, one.pipeline, environment)
    if one.step is not None:
        policy.load_tensors(safetensors.torch.load_file(one.directory / checkpoint.MODEL_FILE))
    return policy


@asynccontextmanager
async def _serving(one: Saved, policy: LanguagePolicy | ActorCriticPolicy, seed: int) -> AsyncIterator[Any]:
    """The pipeline's engine with the weights of the policy, ready for requests."""
    section, device = _engine_section(one.pipeline), one.pipeline.rollout.device
    name = PipelineName(one.pipeline.name)
    site = Site(
        process=RunMember(RunDir(one.directory, RunId("")), "eval", MemberId("eval"), "", name, 0),
        seed=seed,
        device=device,
        threads=torch.get_num_threads(),
        in_pool=False,
        device_at=partial(device_at, device, in_pool=False),
    )
    engine: Any = build_engine(section, policy, site)
    async with Tasks() as tasks:
        try:
            if section.capabilities.weights != "none":
                engine.start(tasks)
                await engine.occupy((), OCCUPY_S)
            yield engine
        finally:
            tasks.cancel()
            await engine.close()


def _engine_section(pipeline: PipelineSection) -> EngineSection:
    """The pipeline's engine, or the default one if the pipeline's needs versions that a run publishes."""
    if pipeline.engine.capabilities.weights == "files":
        return PipelineSection.model_fields["engine"].default
    return pipeline.engine


def sample(one: Saved, prompt: str, *, count: int, temperature: float, max_new_tokens: int | None) -> list[str]:
    """Completions of a prompt; a model with a chat template receives it as a user message."""
    if isinstance(one.pipeline.model, MlpModel):
        raise ConfigError(f"pipeline {one.pipeline.name!r} has a gymnasium policy, which takes no text prompts")
    policy = policy_at(one)
    assert isinstance(policy, LanguagePolicy)
    inner = getattr(policy.tokenizer, "inner", None)
    ids = [*policy.tokenizer.bos_ids, *policy.tokenizer.encode(prompt)]  # as in training
    if inner is not None and inner.chat_template:
        message = [{"role": "user", "content": prompt}]
        ids = inner.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    rollout = one.pipeline.rollout
    sampling = Sampling(
        max_new_tokens=max_new_tokens or rollout.max_new_tokens,
        temperature=temperature or 1.0,
        greedy=not temperature,
        stop_ids=policy.tokenizer.stop_ids,
    )

    async def drawn() -> list[Completion]:
        async with _serving(one, policy, torch.seed() & 0x7FFF_FFFF) as engine:
            return await asyncio.gather(*(engine.complete(ids, sampling) for _ in range(count)))

    return [policy.tokenizer.decode(completion.token_ids.tolist()) for completion in asyncio.run(drawn())]


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean reward over prompts, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    prompts: int
    samples: int
    failed: int


def evaluate(one: Saved, *, prompts: int | None, samples: int, temperature: float, seed: int = 0) -> Measured:
    """Measures rewards on held-out prompts."""
    return asyncio.run(_evaluate(one, prompts, samples, temperature, seed))


async def _evaluate(one: Saved, prompts: int | None, samples: int, temperature: float, seed: int) -> Measured:
    count = prompts or one.pipeline.evaluation.prompts
    pipeline = _evaluating(one, count)
    environment = evaluation_environment_of(one.config, pipeline)
    policy = policy_at(one, environment)
    drawn = {"temperature": temperature or 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    rollout = pipeline.rollout.model_copy(update=drawn)
    env = pipeline.evaluation.env or pipeline.env
    rewards: list[list[float]] = []
    failed, reason = 0, ""
    size = max(1, rollout.batch_samples // samples, _engine_section(pipeline).requests_at_once // samples)
    async with _serving(one, policy, seed) as engine:
        workload: Any = workload_of(env, rollout, environment, policy, engine, None, greedy=not temperature)
        try:
            await asyncio.to_thread(workload.preflight)
            for start in range(0, count, size):
                leases = [_lease(position, samples) for position in range(start, min(start + size, count))]
                prepared = [await asyncio.to_thread(workload.prepare, lease) for lease in leases]
                usable = [one for one in prepared if not isinstance(one, Unusable)]
                failed += (len(prepared) - len(usable)) * samples
                for given, made in zip(usable, await _generate(workload, workload.collate(usable)), strict=True):
                    outcomes = await asyncio.to_thread(workload.postprocess, given, made)
                    if isinstance(outcomes, Future):
                        outcomes = await asyncio.wrap_future(outcomes)
                    kept = [outcome.reward for outcome in outcomes if not isinstance(outcome, Failed)]
                    failed += len(outcomes) - len(kept)
                    reason = reason or next((outcome.error for outcome in outcomes if isinstance(outcome, Failed)), "")
                    if kept:
                        rewards.append(kept)
        finally:
            close_workload(workload)
    if not rewards:
        why = f": {reason.strip().splitlines()[-1]}" if reason else ""
        raise RunFailed(f"no sample of {count} prompts could be scored{why}")
    return _measured(rewards, failed)


def _evaluating(one: Saved, prompts: int) -> PipelineSection:
    """The pipeline with an evaluation of at least `prompts` prompts, none of which was trained on. Makes the
    environment of the training only if there is no other."""
    pipeline = one.pipeline
    section = pipeline.evaluation
    if section.env is None and isinstance(environment_of(one.config, pipeline), DividedEnvironment):
        held_out = section.prompts if section.every_steps else 0
        if prompts > held_out:
            lower = "lower --prompts, or " if held_out else ""
            raise ConfigError(
                f"the run held out {held_out} rows of {pipeline.env.name!r} from training, and {prompts} prompts are "
                f"requested: {lower}name another environment with --env"
            )
        prompts = held_out  # which rows these are depends on their number
    section = section.model_copy(update={"prompts": prompts, "every_steps": 1})
    return pipeline.model_copy(update={"evaluation": section})


async def _generate(workload: Any, batch: Any) -> Any:
    """The result of `generate`, which may be async or blocking."""
    made = await asyncio.to_thread(workload.generate, batch)
    return await made if inspect.isawaitable(made) else made


def _lease(position: int, samples: int) -> PromptLease:
    members = tuple(range(samples))
    ids = tuple(SampleId(position * samples + member) for member in members)
    return PromptLease(PromptIndex(position), 0, ids, members, Version(0), evaluation=Version(0))


def _measured(rewards: Sequence[Sequence[float]], failed: int) -> Measured:
    """Samples of one prompt are correlated, so the interval counts prompts. Binary rewards have Wilson's interval: it
    stays within 0 and 1 and is not empty when all rewards are equal."""
    means = [sum(group) / len(group) for group in rewards]
    count = len(means)
    mean = sum(means) / count
    samples = sum(len(group) for group in rewards)
    if all(value in (0.0, 1.0) for value in means):
        centre = (mean + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
        half = Z_95 / (1 + Z_95**2 / count) * math.sqrt(mean * (1 - mean) / count + Z_95**2 / (4 * count**2))
        return Measured(mean, max(0.0, centre - half), min(1.0, centre + half), count, samples, failed)
    variance = sum((value - mean) ** 2 for value in means) / max(1, count - 1)
    half = Z_95 * math.sqrt(variance / count)
    return Measured(mean, mean - half, mean + half, count, samples, failed)
