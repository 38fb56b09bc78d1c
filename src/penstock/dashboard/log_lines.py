"""Warnings and errors in the logs of the processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (\w+) +(\S+) \S+: (.*)$")
_BLOCKED = re.compile(r"^event loop of (.+) blocked for ([0-9.]+) s in (.+)$")
_RESTARTED = re.compile(r"^\S+ ended \(.*\); starting it again in ")
SERIOUS = ("WARNING", "ERROR", "CRITICAL")


class Warned(NamedTuple):
    """One log line of level WARNING or above."""

    at: float
    level: str
    process: str
    kind: str
    """`blocked`, `restart`, or plain `warning`."""
    text: str


def warned(lines: Iterable[bytes]) -> list[Warned]:
    """The warnings and errors among the lines. Tracebacks and foreign output are only in the log."""
    found = []
    for raw in lines:
        match = _LINE.match(raw.decode("utf-8", "replace"))
        if match is None or match[3] not in SERIOUS:
            continue
        text = match[5]
        kind = "blocked" if _BLOCKED.match(text) else "restart" if _RESTARTED.match(text) else "warning"
        at = datetime.fromisoformat(f"{match[1]}.{match[2]}").timestamp()  # logs are in local time
        found.append(Warned(at, match[3], match[4], kind, text))
    return found
