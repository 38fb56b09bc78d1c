"""The tables in the documentation are those in the code.

After changing a table, run this file as a script to write the documentation anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.weights.faults import TABLE
from penstock.weights.replica import TRANSITIONS, ReplicaState

PAGE = Path(__file__).parents[3] / "docs" / "protocols" / "weights.md"


def replica_table() -> str:
    events = list(dict.fromkeys(event for _, event in TRANSITIONS))
    lines = ["| | " + " | ".join(event.__name__ for event in events) + " |", "|---" * (len(events) + 1) + "|"]
    for state in ReplicaState:
        targets = (TRANSITIONS.get((state, event)) for event in events)
        cells = ("–" if target is None else target.name for target in targets)
        lines.append(f"| **{state.name}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fault_table() -> str:
    lines = ["| fault | replica is | first | tries | then |", "|---|---|---|---|---|"]
    for row in TABLE:
        bounded = bool(row.then)
        cells = [
            row.fault.value,
            row.state.name,
            "; ".join(row.first),
            str(row.tries) if bounded else "–",
            "; ".join(row.then) if bounded else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {"replica": replica_table, "faults": fault_table}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: begin -->\n)(.*?)(<!-- {name}: end -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_table_of_the_code(name: str) -> None:
    found = between(name).search(PAGE.read_text())
    assert found is not None
    assert found[2].strip() == TABLES[name](), f"run `python {Path(__file__).name}` to write {PAGE.name} anew"


if __name__ == "__main__":
    text = PAGE.read_text()
    for name, table in TABLES.items():
        text = between(name).sub(lambda match, table=table: f"{match[1]}\n{table()}\n\n{match[3]}", text)
    PAGE.write_text(text)
