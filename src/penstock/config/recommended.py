"""Recommended settings by kind of model, for the keys that a configuration leaves unset.

Those of the tiny model were chosen over several seeds on copying letters with data two versions old, those of the
gymnasium policy likewise on CartPole. An entropy bonus keeps a model with random weights off plateaus; a pretrained one
must not have it. The learning rate of both falls over the run: once all rewards are equal, further steps of full size
would move the model away from the solution.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.registry import SECTIONS
from penstock.rollout.settings import RolloutSection

MOST_ROWS = 1024
"""More rows are decoded together only if the configuration sets that."""
PRETRAINED: dict[str, dict[str, Any]] = {"optimizer": {"learning_rate": 1e-6, "beta2": 0.99, "warmup_steps": 10}}
ADAPTER_RATE = 10.0
"""The learning rate of an adapter, as a multiple of the rate for all weights of a pretrained model."""

RECOMMENDED: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "token_loss": {"entropy_coefficient": 0.12},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 5, "schedule": "linear"},
    },
    "path": PRETRAINED,
    "hub": PRETRAINED,
    "mlp": {
        "ppo_loss": {"discount": 0.99, "gae_lambda": 0.95},
        "optimizer": {"learning_rate": 2e-3, "epochs": 6, "minibatches": 4, "max_grad_norm": 0.5, "schedule": "linear"},
    },
}


def fill_in(pipeline: dict[str, Any]) -> dict[str, Any]:
    """The table of one pipeline with the recommended settings for its unset keys."""
    model = pipeline.get("model")
    kind = model.get("kind") if isinstance(model, dict) else None
    filled = dict(pipeline)
    for table, settings in RECOMMENDED.get(str(kind), {}).items():
        given = filled.get(table, {})
        if table == "optimizer" and settings is PRETRAINED["optimizer"] and filled.get("lora") is not None:
            settings = settings | {"learning_rate": ADAPTER_RATE * settings["learning_rate"]}
        if isinstance(given, dict):
            filled[table] = settings | given
    return _keep_requests_coming(filled)


def _keep_requests_coming(pipeline: dict[str, Any]) -> dict[str, Any]:
    """Keeps requests waiting at the engine: one call per group, twice as many samples as it decodes at once.

    If the user set the size of calls, the engine decodes the samples of those calls at once.
    """
    engine, rollout, model = (pipeline.get(table, {}) for table in ("engine", "rollout", "model"))
    if not all(isinstance(table, dict) for table in (engine, rollout, model)):
        return pipeline
    section = SECTIONS.get(engine.get("kind", "torch"))
    if section is None or model.get("kind") == "mlp":
        return pipeline
    key, group_size = section.REQUESTS_KEY, rollout.get("group_size", RolloutSection.model_fields["group_size"].default)
    rows = engine.get(key, section.model_fields[key].default)
    copies = engine.get("data_parallel", 1)
    if not all(isinstance(number, int) and number > 0 for number in (rows, group_size, copies)):
        return pipeline  # validation reports it
    chosen = {"batch_samples", "concurrency"} & rollout.keys()
    if not chosen and "workload" not in rollout and rollout.get("ranks", 1) == 1:
        calls = {"batch_samples": group_size, "concurrency": max(1, -(-2 * rows * copies // group_size))}
        return pipeline | {"rollout": rollout | calls}
    fields = RolloutSection.model_fields
    sizes = [rollout.get(name, fields[name].default) for name in ("batch_samples", "concurrency")]
    if key not in engine and all(isinstance(number, int) for number in sizes):
        return pipeline | {"engine": engine | {key: max(rows, min(sizes[0] * sizes[1], MOST_ROWS))}}
    return pipeline
