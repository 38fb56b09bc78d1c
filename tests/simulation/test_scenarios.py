"""Public failures of the field, reproduced on the real loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.launch.simulated import simulate
from penstock.sim.scenarios import SCENARIOS, Scenario, judged, scenario_called, scenarios_in


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
