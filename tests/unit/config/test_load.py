import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import dump, load, validate
from penstock.errors import ConfigError

GOOD = """\
[run]
name = "demo"

[[pipeline]]
name = "letters"
steps = 10
[pipeline.env]
name = "copy"
[pipeline.model]
kind = "tiny"

[[pipeline]]
name = "pole"
steps = 5
[pipeline.env]
name = "gymnasium"
options = { id = "CartPole-v1" }
[pipeline.model]
kind = "mlp"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def mistake(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, text), overrides)
    return str(error.value)


def test_a_good_file_loads_and_survives_a_round_trip(tmp_path: Path):
    config = load(write(tmp_path, GOOD))
    assert [pipeline.kind for pipeline in config.pipeline] == ["language", "gymnasium"]
    assert load(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("pipeline.pole.train.loss=gspo", "train.loss"),
        ("pipeline.pole.train.loss=grpo", "train.loss"),
        ("pipeline.pole.token_loss.clip_low=0.1", "token_loss.clip_low"),
        ("pipeline.pole.rollout.temperature=0.5", "rollout.temperature"),
        ('pipeline.pole.env.rewards=["exact_answer"]', "env.rewards"),
        ("pipeline.pole.engine.rows=8", "engine.rows"),
        ("pipeline.letters.ppo_loss.clip=0.1", "ppo_loss.clip"),
    ],
)
def test_a_key_of_the_other_kind_of_pipeline_is_refused(tmp_path: Path, override: str, named: str):
    policy = "a gymnasium policy" if "pole" in override else "a language model"
    assert f"{named}: no effect on {policy}" in mistake(tmp_path, GOOD, override)


def test_a_resolved_configuration_has_only_the_keys_that_are_used(tmp_path: Path):
    letters, pole = tomllib.loads(dump(load(write(tmp_path, GOOD))))["pipeline"]
    assert "loss" in letters["train"]
    assert "token_loss" in letters
    assert "ppo_loss" not in letters
    assert "ppo_loss" in pole
    assert "token_loss" not in pole
    assert not {"loss", "advantage", "packing", "teacher"} & pole["train"].keys()
    assert "temperature" not in pole["rollout"]
    assert "rewards" not in pole["env"]


def test_a_workload_of_the_user_may_use_the_keys_of_either_kind(tmp_path: Path):
    text = GOOD.replace(
        'options = { id = "CartPole-v1" }', 'rewards = ["my:reward"]\n[pipeline.rollout]\nworkload = "my:W"'
    )
    text = text.replace('workload = "my:W"', 'workload = "my:W"\ntemperature = 0.5')
    config = load(write(tmp_path, text))
    again = load(write(tmp_path, dump(config)))
    assert again == config
    assert again.pipeline[1].rollout.temperature == 0.5


def test_overrides_reach_pipelines_by_name_and_by_position(tmp_path: Path):
    config = load(
        write(tmp_path, GOOD), ["pipeline.pole.steps=7", "pipeline.0.optimizer.learning_rate=0.5", "run.seed=3"]
    )
    assert config.pipeline[1].steps == 7
    assert config.pipeline[0].optimizer.learning_rate == 0.5
    assert config.run.seed == 3


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(tmp_path: Path):
    message = mistake(tmp_path, GOOD.replace('kind = "tiny"', 'kind = "tiny"\nhiden = 3'))
    assert "run.toml:11: unknown key 'pipeline.letters.model.hiden'; did you mean 'hidden'?" in message


def test_an_unknown_key_in_the_second_pipeline_is_found_there(tmp_path: Path):
    message = mistake(tmp_path, GOOD.replace("steps = 5", "steps = 5\nepoch = 3"))
    assert "run.toml:15: unknown key 'pipeline.pole.epoch'; did you mean 'epochs'?" in message


def test_an_unknown_override_is_named(tmp_path: Path):
    assert "did you mean 'steps'?" in mistake(tmp_path, GOOD, "pipeline.letters.stepz=3")


def test_an_override_of_a_pipeline_that_is_not_there(tmp_path: Path):
    assert "expected letters, pole" in mistake(tmp_path, GOOD, "pipeline.chess.steps=3")


def test_a_wrong_type_says_what_was_found(tmp_path: Path):
    message = mistake(tmp_path, GOOD.replace("steps = 10", 'steps = "many"'))
    assert "run.toml:6: pipeline.letters.steps" in message
    assert 'found "many"' in message
    assert len(message.splitlines()) == 1


def test_a_missing_key_is_named(tmp_path: Path):
    assert "'pipeline.letters.steps' is missing" in mistake(tmp_path, GOOD.replace("steps = 10\n", ""))


def test_every_mistake_is_reported_at_once(tmp_path: Path):
    message = mistake(tmp_path, GOOD.replace("steps = 10", "steps = 0").replace('name = "demo"', 'nam = "demo"'))
    assert len(message.splitlines()) == 2


def test_a_model_that_does_not_fit_the_environment(tmp_path: Path):
    assert "needs a model of kind mlp" in mistake(tmp_path, GOOD.replace('kind = "mlp"', 'kind = "tiny"'))


def test_two_pipelines_with_one_name(tmp_path: Path):
    assert "must differ" in mistake(tmp_path, GOOD.replace('name = "pole"', 'name = "letters"'))


RANKS = {"ranks": 2, "group_size": 8, "batch_samples": 16}


@pytest.mark.parametrize(
    ("rollout", "more", "said"),
    [
        (RANKS | {"batch_samples": 15}, {}, "holds no group of 8 for each of 2 ranks; make it at least 16"),
        (RANKS | {"concurrency": 2}, {}, "rollout.concurrency must be 1"),
        (RANKS, {"weights": {"transport": "broadcast"}}, "does not support rollout.ranks above 1: use another"),
        (RANKS, {"engine": {"kind": "vllm"}}, "does not support rollout.ranks above 1: use 'torch'"),
    ],
)
def test_ranks_that_cannot_work(rollout: dict[str, Any], more: dict[str, Any], said: str):
    pipeline = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}, "rollout": rollout}
    with pytest.raises(ConfigError, match=re.escape(said)):
        validate({"pipeline": [pipeline | more]})


def test_ranks_occupy_a_device_each():
    pipeline = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}, "rollout": RANKS}
    with pytest.raises(ConfigError, match="with 2 ranks occupies 2 devices of the pool"):
        validate({"pool": {"devices": 4}, "pipeline": [pipeline]})
    assert validate({"pipeline": [pipeline]}).pipeline[0].rollout.ranks == 2


def test_devices_beyond_the_pool():
    tree = {
        "pool": {"devices": 2},
        "pipeline": [
            {
                "name": "a",
                "steps": 1,
                "train_devices": [0, 5],
                "env": {"name": "copy"},
                "model": {"kind": "tiny"},
            }
        ],
    }
    with pytest.raises(ConfigError, match=r"uses devices \[5\], but pool.devices is 2"):
        validate(tree)


@pytest.mark.parametrize(
    ("pool", "more", "said"),
    [
        (0, {"weights": {"min_healthy": 2}}, "weights.min_healthy is 2, but rollout.workers is 1"),
        (0, {"engine": {"cache_tokens": 64}, "rollout": {"max_new_tokens": 64}}, "engine.cache_tokens is 64"),
        (1, {"rollout": {"devices_per_worker": 2}}, "no 2 neighbouring devices of one node"),
        (4, {"rollout_devices": [0, 2], "rollout": {"devices_per_worker": 2}}, "no 2 neighbouring devices of one node"),
        (2, {"rollout_devices": [0, 0]}, "must be distinct"),
    ],
)
def test_keys_that_do_not_fit_each_other(pool: int, more: dict[str, Any], said: str):
    pipeline = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}
    with pytest.raises(ConfigError, match=said):
        validate({"pool": {"devices": pool}, "pipeline": [pipeline | more]})


@pytest.mark.parametrize("text", ["[run", "a = ", "\x00"])
def test_what_is_not_toml(tmp_path: Path, text: str):
    assert "not valid TOML" in mistake(tmp_path, text)


def test_a_kind_that_is_not_there(tmp_path: Path):
    assert ".kind: there is no kind 'tinny'; did you mean 'tiny'?" in mistake(tmp_path, GOOD.replace("tiny", "tinny"))
    missing = mistake(tmp_path, GOOD.replace('kind = "tiny"', ""))
    assert "run.toml:9: pipeline.letters.model.kind is missing; expected one of: hub, mlp, path, tiny" in missing
    assert "known: http, torch, vllm" in mistake(tmp_path, GOOD, "pipeline.letters.engine.kind=xyz")


def test_a_run_directory_instead_of_a_file(tmp_path: Path):
    (tmp_path / "run.json").touch()
    with pytest.raises(ConfigError, match=r"is a directory: give the path of a \.toml file.*--resume"):
        load(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="no configuration at"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize("override", ["steps", "=3", ""])
def test_an_override_without_a_value(tmp_path: Path, override: str):
    assert "expected key=value" in mistake(tmp_path, GOOD, override)


def test_what_is_left_open_is_filled_in_by_kind_of_model(tmp_path: Path):
    config = load(write(tmp_path, GOOD), ["pipeline.pole.optimizer.epochs=2"])
    letters, pole = config.pipeline
    assert letters.token_loss.entropy_coefficient > 0
    assert (pole.optimizer.epochs, pole.optimizer.minibatches, pole.optimizer.schedule) == (2, 4, "linear")


@pytest.mark.parametrize(
    ("tables", "rate"),
    [({}, 1e-6), ({"lora": {}}, 1e-5), ({"lora": {}, "optimizer": {"learning_rate": 3e-4}}, 3e-4)],
)
def test_an_adapter_of_a_pretrained_model_learns_at_ten_times_the_rate(tables: dict[str, object], rate: float):
    table = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "path", "path": "m"}} | tables
    (pipeline,) = validate({"pipeline": [table]}).pipeline
    assert pipeline.optimizer.learning_rate == pytest.approx(rate)


def test_import_paths_survive_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load(write(tmp_path, GOOD), ['run.extra_path=["mine"]'])
    assert config.run.extra_path == [tmp_path / "mine"]


PATHS = """\
[[pipeline]]
name = "p"
steps = 1
[pipeline.env]
name = "jsonl"
options = { path = "rows.jsonl" }
[pipeline.model]
kind = "tiny"
[pipeline.evaluation]
every_steps = 1
[pipeline.evaluation.env]
name = "jsonl"
options = { path = "test.jsonl" }
"""


def test_paths_are_beside_the_file_or_in_the_working_directory_and_then_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    project, here = tmp_path / "project", tmp_path / "here"
    for path in (project / "rows.jsonl", project / "test.jsonl", here / "test.jsonl", here / "more.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.chdir(here)
    [pipeline] = load(write(project, PATHS)).pipeline
    assert pipeline.env.options["path"] == str(project / "rows.jsonl")
    assert pipeline.evaluation.env is not None
    assert pipeline.evaluation.env.options["path"] == str(project / "test.jsonl")
    [pipeline] = load(write(project, PATHS), ["pipeline.p.env.options.path=more.jsonl"]).pipeline
    assert pipeline.env.options["path"] == str(here / "more.jsonl")
    (project / "rows.jsonl").rename(here / "rows.jsonl")
    [pipeline] = load(write(project, PATHS)).pipeline
    assert pipeline.env.options["path"] == str(here / "rows.jsonl")


def test_one_bracket_instead_of_two_is_told_how_to_be_written(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[pipeline]\nname = "p"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:1: pipeline .* write \[\[pipeline\]\]"):
        load(path)


@pytest.mark.parametrize("key", ["suspect_after_s", "evict_after_s"])
def test_heartbeats_are_more_frequent_than_silence_counts(key: str):
    with pytest.raises(ConfigError, match=f"control: {key} = 2 is no more than heartbeat_every_s = 2"):
        validate({"control": {"heartbeat_every_s": 2, key: 2}, "pipeline": []})
