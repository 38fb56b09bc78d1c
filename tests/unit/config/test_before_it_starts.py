"""What a new user gets wrong is said before anything starts, and points to where it was written."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.batch.advantage import NAMED as ADVANTAGES
from penstock.config.check import check_by_making, check_environment, check_models
from penstock.config.load import dump, load
from penstock.config.pipeline import PipelineSection
from penstock.envs.tasks import Copy
from penstock.envs.tools import WithTools
from penstock.errors import ConfigError
from penstock.roles.environments import environment_of
from penstock.train.optim import learning_rate

BASE = """\
[run]
extra_path = ["mine"]
[[pipeline]]
name = "p"
steps = 3
[pipeline.env]
{env}
[pipeline.model]
{model}
"""
TINY = 'kind = "tiny"'


def written(folder: Path, env: str = 'name = "copy"', model: str = TINY) -> Path:
    path = folder / "run.toml"
    path.write_text(BASE.format(env=env, model=model))
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration's folder, which is not the working directory."""
    monkeypatch.chdir("/")
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "mine").mkdir()
    return tmp_path


def test_a_ring_has_room_for_every_step_under_way(tmp_path: Path):
    config = load(written(tmp_path), ["pipeline.p.train.groups_per_step=600", "pipeline.p.rollout.group_size=8"])
    section = config.pipeline[0]
    assert section.rollout.ring_slots == 4096
    assert section.ring_slots >= 4800 * (section.train.max_staleness + 1)
    with pytest.raises(ConfigError, match="does not fit into a ring"):
        load(written(tmp_path), ["pipeline.p.train.groups_per_step=600000"])


def test_a_ring_has_room_for_the_bytes_of_every_step_under_way(tmp_path: Path):
    large = [
        "pipeline.p.train.groups_per_step=512",
        "pipeline.p.rollout.group_size=16",
        "pipeline.p.model.max_length=4096",
    ]
    section = load(written(tmp_path), [*large, "pipeline.p.rollout.max_new_tokens=2048"]).pipeline[0]
    assert section.sample_bytes == 9 * 2048
    assert section.ring_bytes(section.sample_bytes) >= 512 * 16 * (section.train.max_staleness + 1) * 9 * 2048
    small = load(written(tmp_path)).pipeline[0]
    assert small.ring_bytes(small.sample_bytes) == 64 << 20


def test_episodes_that_shared_memory_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run.toml"
    env = 'name = "gymnasium"\noptions = { id = "Pendulum-v1", max_episode_steps = 1000000 }'
    path.write_text(BASE.format(env=env, model='kind = "mlp"'))
    config = load(path)
    size = SimpleNamespace(f_blocks=1 << 24, f_frsize=1 << 12)
    monkeypatch.setattr("penstock.config.check.os.statvfs", lambda path: size)
    check_by_making(config)
    size.f_blocks = 1 << 14  # 64 MiB, as containers have by default
    with pytest.raises(ConfigError, match=r"may take \d+ MiB of shared memory.*--shm-size.*max_episode_steps"):
        check_by_making(config)


def test_paths_are_relative_to_the_configuration(elsewhere: Path):
    (elsewhere / "model").mkdir()
    config = load(written(elsewhere, model='kind = "path"\npath = "model"'))
    assert config.run.extra_path == [(elsewhere / "mine").resolve()]
    check_environment(config)


def test_models_that_cannot_be_trained_or_served_are_named(tmp_path: Path):
    from transformers import BertConfig, LlamaConfig, Qwen2_5_VLConfig, Qwen3NextConfig

    LlamaConfig().save_pretrained(tmp_path / "model")
    config = load(written(tmp_path, model='kind = "path"\npath = "model"'))
    check_models(config)
    for kind, reason in (
        (Qwen3NextConfig, "Qwen3NextForCausalLM has layers of other kinds: linear_attention; serve it with vLLM"),
        (BertConfig, "BertLMHeadModel cannot be trained: the log-probability of a token changes"),
        (Qwen2_5_VLConfig, "'qwen2_5_vl' cannot be trained: transformers [0-9.]+ has no causal language model"),
    ):
        kind().save_pretrained(tmp_path / "model")
        with pytest.raises(ConfigError, match=f"pipeline 'p': .*{reason}"):
            check_models(config)
    Qwen3NextConfig().save_pretrained(tmp_path / "model")
    check_models(load(written(tmp_path, model='kind = "path"\npath = "model"'), ["pipeline.p.engine.kind=vllm"]))


def test_a_mistake_in_an_override_points_to_the_override(tmp_path: Path):
    with pytest.raises(ConfigError) as found:
        load(written(tmp_path), ["pipeline.p.train.groups_per_step=none"])
    assert str(found.value).startswith("--set pipeline.p.train.groups_per_step=none: ")
    assert "run.toml:" not in str(found.value)


def test_an_import_error_names_the_line_and_the_paths(elsewhere: Path):
    (elsewhere / "mine" / "broken_env.py").write_text("import os\n\n\nraise RuntimeError('no')\n")
    with pytest.raises(ConfigError, match=r"RuntimeError: no \(.*broken_env.py:4\)"):
        check_environment(load(written(elsewhere, env='name = "broken_env:Env"')))
    with pytest.raises(ConfigError, match=r"begins with '.*mine'.*run.extra_path"):
        check_environment(load(written(elsewhere, env='name = "not_there:Env"')))


def test_a_hub_id_is_answered_with_how_to_write_it(tmp_path: Path):
    config = load(written(tmp_path, model='kind = "path"\npath = "org/some-model"'))
    with pytest.raises(ConfigError, match="kind = 'hub'"):
        check_environment(config)


@pytest.mark.parametrize(
    ("setting", "package", "extra"),
    [
        ("pipeline.p.lora.rank=4", "peft", "lora"),
        ("pipeline.p.engine.kind=vllm", "vllm", "vllm"),
        ('pipeline.p.env.rewards=["math_verify"]', "math_verify", "data"),
        ("payload.transport=ucxx", "ucxx", "ucxx"),
    ],
)
def test_a_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, package: str, extra: str):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install 'penstock-rl\[{extra}\]'"):
        check_environment(load(written(tmp_path), [setting]))


def test_a_dataset_without_the_column_that_is_scored(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "solution": "2"}\n')
    env = 'name = "jsonl"\noptions = { path = "rows.jsonl" }'
    with pytest.raises(ConfigError, match=r"reward 'exact_answer' has a parameter 'answer'"):
        check_environment(load(written(tmp_path, env=env)))
    options = 'options = { path = "rows.jsonl", columns = { prompt = "question" } }'
    with pytest.raises(ConfigError, match="column 'question'"):
        check_environment(load(written(tmp_path, env=f'name = "jsonl"\n{options}')))


def test_a_random_prompt_is_refused(elsewhere: Path):
    (elsewhere / "mine" / "dicing_env.py").write_text(
        "import random\nfrom penstock.envs.tasks import Copy\n"
        "class Dice(Copy):\n    def prompt(self, position):\n        return super().prompt(random.randrange(10**9))\n"
    )
    config = load(written(elsewhere, env='name = "dicing_env:Dice"'))
    with pytest.raises(ConfigError, match="another prompt each time"):
        environment_of(config, config.pipeline[0])
    with pytest.raises(ConfigError, match="another prompt each time"):
        check_by_making(config)


def test_tools_keep_the_alphabet():
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    tools = WithTools(Copy(seed=0), [add])
    assert set(Copy(seed=0).alphabet) < set(tools.alphabet)
    assert len(set(tools.alphabet)) == len(tools.alphabet)
    assert not hasattr(tools, "hold_out")


def test_arguments_of_a_gymnasium_environment_reach_it(tmp_path: Path):
    path = tmp_path / "run.toml"
    env = 'name = "gymnasium"\noptions = { id = "Pendulum-v1", options = { g = 3.5 } }'
    path.write_text(BASE.format(env=env, model='kind = "mlp"'))
    config = load(path)
    check_environment(config)
    environment = environment_of(config, config.pipeline[0])
    assert environment._idle[0].unwrapped.g == 3.5
    environment.close()


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_a_group_of_one_teaches_a_language_model_nothing(tmp_path: Path, advantage: str):
    one = ["pipeline.p.rollout.group_size=1", f"pipeline.p.train.advantage={advantage}"]
    with pytest.raises(ConfigError, match="every advantage would be 0"):
        load(written(tmp_path), one)
    assert load(written(tmp_path), [*one[1:], "pipeline.p.rollout.group_size=2"])


def test_a_group_of_one_is_right_where_a_critic_or_the_user_compares(tmp_path: Path):
    one = ["pipeline.p.rollout.group_size=1"]
    gymnasium = written(tmp_path, 'name = "gymnasium"\n[pipeline.env.options]\nid = "CartPole-v1"', 'kind = "mlp"')
    assert load(gymnasium, one).pipeline[0].rollout.group_size == 1
    assert load(written(tmp_path), [*one, "pipeline.p.train.advantage=mine:rewards"])


def test_a_run_that_is_resumed_for_longer_decays_over_its_whole_length(tmp_path: Path):
    path = written(tmp_path)
    path.write_text(dump(load(path, ["pipeline.p.steps=240"])))  # as the run directory keeps it
    shorter, longer = load(path).pipeline[0], load(path, ["pipeline.p.steps=480"]).pipeline[0]
    assert shorter.optimizer.schedule == "linear"

    def share(section: PipelineSection, step: int) -> float:
        return learning_rate(section.optimizer, step, section.steps) / section.optimizer.learning_rate

    final, warmup = shorter.optimizer.final_fraction, shorter.optimizer.warmup_steps
    assert share(shorter, 240) == pytest.approx(final)
    assert share(longer, 240) == pytest.approx(1 - (1 - final) * (240 - warmup) / (480 - warmup))
    assert share(longer, 480) == pytest.approx(final)


def test_more_workers_than_the_bound_can_fill_are_said_to_be(tmp_path: Path):
    def said(*overrides: str) -> str:
        return load(written(tmp_path), [f"pipeline.p.{one}" for one in overrides]).pipeline[0].limited_calls()

    assert said() == said("rollout.workers=6") == ""
    sentence = said("rollout.workers=4", "rollout.batch_samples=128")
    assert "4 workers could generate 512 samples at once" in sentence
    assert "max_staleness = 2 allows 384 in flight" in sentence
    assert sentence.endswith("max_staleness = 4")
    assert said("rollout.workers=4", "rollout.batch_samples=128", "train.max_staleness=4") == ""
