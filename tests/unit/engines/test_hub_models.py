"""Models by hub name: from a local cache, with no network; what is not there is never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.load import validate
from penstock.engines.hub import cached, directory_of
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.settings import HubModel
from penstock.errors import ConfigError
from penstock.roles.models import policy_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment at import


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """As huggingface_hub lays it out, with one small model."""
    folder = tmp_path / "models--someone--tiny-letters"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    policy = build(TinyLanguageModel(alphabet="abc>", hidden_size=16, heads=2))
    assert isinstance(policy, LanguagePolicy)
    policy.module.save_pretrained(snapshot)  # type: ignore[operator]
    policy.tokenizer.save(snapshot)
    return tmp_path


@pytest.mark.parametrize("revision", ["", "main", COMMIT])
def test_a_cached_model_is_found_without_network(cache: Path, revision: str):
    model = HubModel(name="someone/tiny-letters", revision=revision, cache=cache)
    assert directory_of(model).name == COMMIT


def test_it_is_trained_like_any_other(cache: Path):
    table = {"kind": "hub", "name": "someone/tiny-letters", "cache": str(cache)}
    config = validate({"pipeline": [{"name": "a", "steps": 1, "env": {"name": "copy"}, "model": table}]})
    assert config.pipeline[0].optimizer.learning_rate == 1e-6  # as for a directory
    policy = policy_of(config, config.pipeline[0], None)
    assert isinstance(policy, LanguagePolicy)
    assert policy.tokenizer.encode("cab>") == [5, 3, 4, 6]


def test_a_model_that_is_not_there_says_how_to_get_it(cache: Path):
    model = HubModel(name="someone/other", cache=cache)
    assert cached(model) is None
    with pytest.raises(ConfigError, match=r"not in the cache .* hf download someone/other"):
        directory_of(model)


def test_a_half_downloaded_model_is_not_taken(cache: Path):
    (cache / "models--someone--tiny-letters" / "snapshots" / COMMIT / "model.safetensors").unlink()
    assert cached(HubModel(name="someone/tiny-letters", cache=cache)) is None


def test_a_path_is_no_name():
    table = {"kind": "hub", "name": "./models/mine"}
    with pytest.raises(ConfigError, match="name"):
        validate({"pipeline": [{"name": "a", "steps": 1, "env": {"name": "copy"}, "model": table}]})
