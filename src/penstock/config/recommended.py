"""Settings that learn, by kind of model: what a run uses for whatever its configuration leaves open.

The tiny model's were chosen over several seeds on copying letters with data two versions old, the gymnasium policy's
on CartPole likewise. An entropy bonus is what keeps a model trained from nothing off plateaus; a pretrained one must
not have it. The learning rate of both falls over the run: once all rewards are the same, the steps that are left would
else be as long as ever, and lead away.
"""

from __future__ import annotations

from typing import Any

PRETRAINED: dict[str, dict[str, Any]] = {"optimizer": {"learning_rate": 1e-6, "beta2": 0.99, "warmup_steps": 10}}

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
    """The table of one pipeline with the recommended settings where it says nothing."""
    model = pipeline.get("model")
    kind = model.get("kind") if isinstance(model, dict) else None
    filled = dict(pipeline)
    for table, settings in RECOMMENDED.get(str(kind), {}).items():
        given = filled.get(table, {})
        if isinstance(given, dict):
            filled[table] = settings | given
    return _keep_requests_coming(filled)


def _keep_requests_coming(pipeline: dict[str, Any]) -> dict[str, Any]:
    """A request engine should always have requests waiting: one call for each group, twice as many as it decodes."""
    engine, rollout = pipeline.get("engine", {}), pipeline.get("rollout", {})
    if not isinstance(engine, dict) or not isinstance(rollout, dict):
        return pipeline
    continuous = engine.get("batching") == "continuous"
    if {"batch_samples", "concurrency"} & rollout.keys() or not (continuous or engine.get("kind") == "vllm"):
        return pipeline
    rows, group_size = engine.get("rows" if continuous else "max_requests", 64), rollout.get("group_size", 8)
    if not isinstance(rows, int) or not isinstance(group_size, int) or group_size < 1:
        return pipeline  # validation will say so
    concurrency = max(1, -(-2 * rows // group_size))
    return pipeline | {"rollout": rollout | {"batch_samples": group_size, "concurrency": concurrency}}
