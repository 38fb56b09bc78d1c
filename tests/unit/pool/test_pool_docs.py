"""The protocol page shows the tables the code runs on."""

from __future__ import annotations

from pathlib import Path

from penstock.pool.lease import HOLD_TABLE, SEAT_TABLE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocols" / "pool.md"


def rows(table: dict) -> list[str]:
    return [f"| {state} | {what} | {following} |" for (state, what), following in table.items()]


def section(name: str) -> list[str]:
    text = PAGE.read_text()
    body = text.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
    return [line for line in body.splitlines() if line.startswith("| ") and not line.startswith("| in state")]


def test_the_page_draws_the_seat_table():
    assert section("seats") == rows(SEAT_TABLE)


def test_the_page_draws_the_hold_table():
    assert section("holds") == rows(HOLD_TABLE)
