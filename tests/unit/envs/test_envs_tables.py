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


def test_a_table_may_be_stored_in_any_usual_way(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    table = datasets.Dataset.from_dict({"question": ["1+1", "2+2"], "solution": ["two", "four"]})
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_json(str(tmp_path / "t.jsonl"))
    table.to_csv(str(tmp_path / "t.csv"))
    (tmp_path / "named").mkdir()  # as on the hub: a directory with files of splits
    table.to_parquet(str(tmp_path / "named" / "test-00000.parquet"))
    schema = table.data.table.schema
    with arrow.OSFile(str(tmp_path / "t.arrow"), "wb") as file, arrow.ipc.new_stream(file, schema) as writer:
        writer.write_table(table.data.table)
    columns = {"prompt": "question", "answer": "solution"}
    for name in ("saved", "t.jsonl", "t.csv", "t.arrow", "named"):
        options = {"path": str(tmp_path / name), "columns": columns, "shuffle": False}
        environment = make_environment("dataset", options | ({"split": "test"} if name == "named" else {}))
        assert (environment.rows, environment.prompt(1).text) == (2, "2+2"), name
        assert environment.prompt(3).columns["answer"] == "four", name
        environment.close()
