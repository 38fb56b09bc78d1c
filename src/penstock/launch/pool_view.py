"""Display of the shared device pool: which pipeline uses which device, which wait, and the number of moves."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

ROWS_SHOWN = 16


def line_of(pool: dict[str, Any]) -> str:
    """The whole pool in one line, for pipes and logs."""
    uses = "  ".join(f"{_span(devices)} {name} {doing}" for devices, name, doing, _ in _grouped(pool))
    idle = f"  {pool['idle']} idle" if pool["idle"] else ""
    return f"pool: {uses}{idle}  {_moves(pool)}"


def troubles_of(pool: dict[str, Any], pipelines: Container[str]) -> list[str]:
    """One sentence for each of these pipelines that has a problem, and for each that waits for devices."""
    shares = [share for share in pool["shares"] if share["pipeline"] in pipelines]
    return [share["trouble"] for share in shares if share["trouble"]] + list(pool["waiting"])


def panel_of(pool: dict[str, Any]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(name, style="dim") for name in ("devices", "pipeline", "doing", "since")))
    groups = _grouped(pool)
    for devices, name, doing, since_s in groups[:ROWS_SHOWN]:
        table.add_row(_span(devices), name, doing, f"{since_s:.0f} s")
    if len(groups) > ROWS_SHOWN:
        table.add_row(f"and {len(groups) - ROWS_SHOWN} more")
    return Panel(table, title=counts_of(pool), title_align="left")


def counts_of(pool: dict[str, Any]) -> str:
    states = {"generating": "generating", "held": "held by trainers", "moving": "moving", "idle": "idle"}
    counts = ", ".join(f"{pool[state]} {named}" for state, named in states.items() if pool[state])
    return f"pool · {counts} · {_moves(pool)}"


def _grouped(pool: dict[str, Any]) -> list[tuple[list[int], str, str, float]]:
    """Adjacent devices on which one pipeline does the same thing, and for how many seconds the newest of them has."""
    groups: list[tuple[list[int], str, str, float]] = []
    for use in pool["uses"]:
        devices, name, doing, since_s = list(use["devices"]), use["pipeline"], use["doing"], use["since_s"]
        if groups and groups[-1][1:3] == (name, doing) and groups[-1][0][-1] + 1 == devices[0]:
            devices, since_s = groups[-1][0] + devices, min(since_s, groups[-1][3])
            groups.pop()
        groups.append((devices, name, doing, since_s))
    return groups


def _span(devices: list[int]) -> str:
    if len(devices) > 1 and devices[-1] - devices[0] == len(devices) - 1:
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices))


def _moves(pool: dict[str, Any]) -> str:
    failed = f" ({pool['failed_moves']} failed)" if pool["failed_moves"] else ""
    return f"{pool['moves']} moves{failed}"
