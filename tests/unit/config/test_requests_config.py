"""What the configuration says about request engines and truncated sampling."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.load import dump, validate
from penstock.config.run import Config
from penstock.errors import ConfigError


def config(engine: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **tables: Any) -> Config:
    pipeline = {
        "name": "letters",
        "steps": 1,
        "env": {"name": "copy"},
        "model": {"kind": "tiny"},
        "rollout": rollout or {},
        **({"engine": engine} if engine is not None else {}),
        **tables,
    }
    return validate({"pipeline": [pipeline]})


def test_an_engine_is_kept_busy_unless_the_user_says_otherwise() -> None:
    for engine in ({"rows": 30}, {"kind": "vllm", "max_requests": 30}):
        busy = config(engine, {"group_size": 4}).pipeline[0].rollout
        assert (busy.batch_samples, busy.concurrency) == (4, 15)
        assert (busy.batch_samples * busy.concurrency) >= 2 * 30
    own = config({}, {"concurrency": 3}).pipeline[0]
    assert (own.rollout.batch_samples, own.rollout.concurrency) == (64, 3)
    assert own.engine.requests_at_once == 3 * 64, "the engine decodes all that the calls bring"
    assert config({"rows": 9}, {"concurrency": 3}).pipeline[0].engine.requests_at_once == 9
    ranks = config({}, {"ranks": 2}).pipeline[0].rollout
    assert (ranks.batch_samples, ranks.concurrency) == (64, 1)


def test_the_queue_holds_at_least_one_call() -> None:
    assert config({}, {"batch_samples": 256}).pipeline[0].rollout.waiting_samples == 512
    assert config({}, {"batch_samples": 32}).pipeline[0].rollout.waiting_samples == 128
    with pytest.raises(ConfigError, match="would be cut to 128"):
        config({}, {"batch_samples": 256, "queue_samples": 128})


def test_what_was_filled_in_survives_a_round_trip() -> None:
    import tomllib

    filled = config({"rows": 8}, {"top_k": 5, "top_p": 0.9})
    assert validate(tomllib.loads(dump(filled))) == filled


@pytest.mark.parametrize(
    ("engine", "rollout", "message"),
    [
        ({"batching": "continuous"}, {}, "engine.batching' was removed"),
        ({"rows": 0}, {}, "engine.rows"),
        ({"rowz": 3}, {}, "did you mean 'rows'"),
        ({}, {"group_size": 0}, "rollout.group_size"),
        ({}, {"top_p": 0.0}, "rollout.top_p"),
        ({}, {"top_k": 0}, "rollout.top_k"),
        ({}, {"min_p": 1.5}, "rollout.min_p"),
    ],
)
def test_mistakes_are_named(engine: dict[str, Any], rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(engine, rollout)


def test_only_some_engines_act_for_gymnasium() -> None:
    with pytest.raises(ConfigError, match="no gymnasium policies"):
        config({"kind": "vllm"}, env={"name": "gymnasium"}, model={"kind": "mlp"})


@pytest.mark.parametrize("rollout", [{"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.4}])
def test_truncated_samples_are_not_masked_away(rollout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mask_low"):
        config({}, rollout, token_loss={"importance": "mask"})
    config({}, rollout, token_loss={"importance": "truncate"})
    config({}, {"top_p": 0.6}, token_loss={"importance": "mask"})  # what is left is at least 0.6
