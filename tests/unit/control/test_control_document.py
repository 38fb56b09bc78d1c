"""The protocol page draws its tables from the tables in the code."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.control import controller, effects, events
from penstock.control.phase import PHASES
from penstock.control.samples import MOVES, REASONS
from penstock.wire import messages

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocols" / "control.md"


def drawn(name: str) -> str:
    found = re.search(rf"<!-- {name}: begin -->(.*?)<!-- {name}: end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"{PAGE.name} has no place for the table of {name}"
    return found[1].strip()


def table(moves: dict) -> str:
    rows = [f"| {source or '–'} | {target} | {cause} |" for (source, target), cause in moves.items()]
    return "\n".join(["| from | to | because |", "|---|---|---|", *rows])


def test_the_page_shows_every_move_of_a_sample():
    assert drawn("samples") == table(MOVES)


def test_the_page_shows_every_move_of_a_pipeline():
    assert drawn("phases") == table(PHASES)


def test_the_page_names_every_reason():
    assert drawn("reasons") == ", ".join(f"*{reason}*" for reason in REASONS)


def test_the_page_names_only_events_and_effects_that_exist():
    named = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", PAGE.read_text()))
    known = {name for module in (events, effects, messages, controller) for name in vars(module)}
    assert named - known == {"SampleTable"}
