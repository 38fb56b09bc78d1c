"""Tables as environments: mapped columns, rows held out, errors before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.envs.registry import make_environment
from penstock.envs.rewards import math_verify
from penstock.errors import ConfigError


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    path = tmp_path / "sums.parquet"
    parquet.write_table(arrow.table({"question": ["1+1", "2+2", "3+3"], "solution": ["2", "4", "6"]}), path)
    return path


def test_rows_are_prompts_by_position_and_some_are_held_out(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    columns = {"prompt": "question", "answer": "solution"}
    options = {"path": str(parquet), "columns": columns, "shuffle": False}
    environment = make_environment("dataset", options)
    assert environment.prompt(1).text == "2+2"
    assert environment.prompt(1).columns["answer"] == "4"
    held_out = environment.hold_out(1)
    assert (environment.rows, held_out.rows) == (2, 1)
    assert held_out.prompt(0).text == "3+3"
    assert [environment.prompt(position).text for position in range(4)] == ["1+1", "2+2"] * 2
    chat = make_environment("dataset", options | {"system": "Be brief."})
    assert [message.role for message in chat.prompt(0).messages] == ["system", "user"]
    with pytest.raises(ConfigError, match="there is no column 'nothing'"):
        make_environment("dataset", options | {"columns": {"prompt": "nothing"}})
    with pytest.raises(ConfigError, match="No such file"):
        make_environment("dataset", {"path": str(tmp_path / "none.parquet")})


def test_formulas_are_compared_by_what_they_mean() -> None:
    pytest.importorskip("math_verify")
    said = ["so it is $\\frac{1}{2}$", "so it is $\\frac{1}{3}$", "$1$"]
    assert math_verify(["p"] * 3, said, ["0.5", "0.5", None]) == [1.0, 0.0, None]
