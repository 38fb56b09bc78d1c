"""Public failures of the field, reproduced on the real loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.launch.simulated import simulate
from penstock.sim.scenarios import SCENARIOS, Scenario, judged, scenario_called, scenarios_in
from penstock.sim.storms import Fault


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    result = judged(scenario, simulate(scenario.plan))
    assert not result.problem


def test_a_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from penstock.sim.plan import Plan\n"
        "from penstock.sim.scenarios import Scenario\n"
        "SCENARIOS = [Scenario(name='mine', here='it trains', plan=Plan(steps=2))]\n"
    )
    assert [one.name for one in scenarios_in(file)] == ["mine"]
    file.write_text("SCENARIOS = 3\n")
    with pytest.raises(ConfigError, match="SCENARIOS"):
        scenarios_in(file)
    with pytest.raises(ConfigError, match="buffer-one-short"):
        scenario_called("none")


MINE = """
[[scenario]]
name = "lost-cable"
here = "the worker is suspected and then evicted; its leases are issued again"
struck_s = 5.0
says = "evicted"
within_s = 20.0

[scenario.plan]
steps = 16
work = { sample_s = 2.0 }
settings = { "control.evict_after_s" = 10.0 }

[[scenario.plan.faults]]
at_s = 5.0
what = "cut"
target = "p0.rollout.0"
for_s = 30.0
"""


def test_a_users_own_file_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    (scenario,) = scenarios_in(file)
    assert scenario.plan.faults == (Fault(5.0, "cut", "p0.rollout.0", for_s=30.0),)
    assert not judged(scenario, simulate(scenario.plan)).problem


@pytest.mark.parametrize(
    ("there", "instead", "sentence"),
    [
        ("steps = 16", "stepps = 16", "unknown field `stepps`"),
        ("[[scenario]]", "[[scenarios]]", "must have tables"),
        ("= 30.0", "= 'long'", "Expected `float`"),
        ('what = "cut"', 'what = "pause"', "no fault 'pause'; there are: .*cut"),
        ("rollout.0", "rollout.9", "no process 'p0.rollout.9'; there are: controller, p0.trainer"),
        ("steps = 16", "steps = 16\nconfig = {}", "only be written in Python"),
        ("name =", "name", "mine.toml"),
    ],
)
def test_mistakes_in_a_users_own_file(tmp_path: Path, there: str, instead: str, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE.replace(there, instead, 1))
    with pytest.raises(ConfigError, match=sentence):
        scenarios_in(file)
