"""Evaluations in a worker: a held-out environment, and separate hooks around the worker's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.protocol import Engine
from penstock.records.prompt import PromptLease
from penstock.roles.environments import evaluation_environment_of
from penstock.roles.preparing import make_rubric
from penstock.roles.process import RoleProcess
from penstock.rollout.hooks import Finished
from penstock.rollout.io.hook_calls import Evaluating
from penstock.rollout.io.workloads import close_workload, workload_of
from penstock.train.rollout_log import RolloutLog, TrainedRollout

CLOSE_S = 2.0


@contextmanager
def evaluating(
    process: RoleProcess, engine: Engine, policy: LanguagePolicy | ActorCriticPolicy
) -> Iterator[Evaluating | None]:
    """The evaluation hooks of a worker; None without evaluations. Readable samples are flushed when the block ends."""
    pipeline, section = process.pipeline, process.pipeline.evaluation
    if not section.every_steps:
        yield None
        return
    environment = evaluation_environment_of(process.config, pipeline)
    drawn = {"temperature": section.temperature or 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    rollout = pipeline.rollout.model_copy(update=drawn)
    greedy = not section.temperature
    workload = workload_of(
        section.env or pipeline.env,
        rollout,
        environment,
        policy,
        engine,
        None,
        greedy=greedy,
        rubric_elsewhere=(make_rubric, (process.run.config_path, pipeline.name, True)),
        progressed=process.progress.moved,
    )
    tokenizer = getattr(policy, "tokenizer", None)
    readable = RolloutLog(
        process.run.rollouts(pipeline.name) / "evaluations.jsonl",
        decode=tokenizer.decode if tokenizer is not None else None,
        every_steps=1,
        samples_per_step=1,
    )

    def keep(lease: PromptLease, member: int, made: Finished) -> None:
        if lease.prompt < section.save_count:
            sample = lease.samples[lease.members.index(member)]
            shown = TrainedRollout(lease.prompt, sample, made.version, made.reward, None, made.arrays)
            readable.offer(made.version, [shown])

    try:
        yield Evaluating(workload, engine, keep)
    finally:
        close_workload(workload)
        readable.close(CLOSE_S)
