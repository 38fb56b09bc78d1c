"""What the journal keeps of the pool's decisions: replay decides again, a picture of the pool over time cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.pool import events as pool

_encode = msgspec.msgpack.Encoder().encode


def noteworthy(decided: Sequence[pool.Effect]) -> bytes:
    """Which devices were promised to whom: what a picture of the pool over time needs beyond the events."""
    notes: dict[str, list[Any]] = {}
    for effect in decided:
        match effect:
            case pool.GrantDevices(member=member, request=request, devices=devices):
                notes.setdefault("granted", []).append((member, request, devices))
            case pool.WakeWorker(member=member, order=order) | pool.SleepWorker(member=member, order=order):
                notes.setdefault("ordered", []).append((member, order.number, order.action, order.devices))
            case pool.FenceMember(member=member, reason=reason):
                notes.setdefault("fenced", []).append((member, reason))
            case pool.Log(level=level, message=line) if level != "info":
                notes.setdefault("said", []).append(line)
    return _encode(notes) if notes else b""
