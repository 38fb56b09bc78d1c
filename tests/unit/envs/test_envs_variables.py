"""What programs of agents see of the environment: no secrets of whoever started the run."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from penstock.envs.io.agents import Agent
from penstock.envs.io.variables import passed_variables
from penstock.envs.io.verifiers import _Bridge
from penstock.errors import ConfigError

SECRETS = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_ORG", "GITHUB_TOKEN", "https_proxy")
COUNT = "import os; print(sum(one.startswith('secret') for one in os.environ.values()), end=' ')"
NEEDED = "('PATH', 'OPENAI_API_KEY', 'PENSTOCK_MEMBER', 'LC_ALL')"
SEES = f"{COUNT}; print(int(all(name in os.environ for name in {NEEDED})))"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret of {name}")
    monkeypatch.setenv("PENSTOCK_MEMBER", "worker-1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


def counted(**options: Any) -> float:
    """How many secrets its program sees."""
    return Agent(command=[sys.executable, "-c", COUNT], **options).play("http://here", "key", 0).reward


def test_a_program_sees_no_secret_but_those_that_are_passed():
    assert counted() == 0
    assert counted(pass_env=["HF_TOKEN", "GITHUB_TOKEN"]) == 2


def test_it_sees_what_programs_need():
    assert Agent(command=[sys.executable, "-c", SEES]).play("http://here", "key", 0).reward == 1


def test_the_process_of_verifiers_sees_no_secret_either():
    for passed, expected in (((), set()), (("HF_TOKEN",), {"secret of HF_TOKEN"})):
        variables = _Bridge("python", "{}", ("/mine",), passed)._variables
        assert {value for value in variables.values() if value.startswith("secret")} == expected
        assert variables["PYTHONPATH"] == "/mine"


def test_a_variable_that_is_not_set_is_a_mistake():
    with pytest.raises(ConfigError, match=r"env.options.pass_env names 'NO_SUCH_KEY'"):
        passed_variables(["NO_SUCH_KEY"])
