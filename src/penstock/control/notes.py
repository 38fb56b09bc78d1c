"""Notes that the journal stores with each event: replay recomputes decisions, `penstock story` cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.control import effects
from penstock.pool import events as pool
from penstock.wire.messages import BatchReady, Delivered, Leased

_encode = msgspec.msgpack.Encoder().encode


def encode_notes(decided: Sequence[msgspec.Struct]) -> bytes:
    """Encodes the decisions that a story needs beyond the event: leases, batches, refusals, evictions, granted devices,
    orders and log lines. Empty if there are none."""
    notes: dict[str, Any] = {}
    for effect in decided:
        match effect:
            case Leased(leases=leases) if leases:
                what = "evaluation_leases" if leases[0].evaluation is not None else "leases"
                notes[what] = [(lease.prompt, lease.attempt, lease.samples) for lease in leases]
            case BatchReady(batch=batch):
                notes["batch"] = [(group.prompt, group.attempt, group.samples) for group in batch.groups]
            case Delivered(refused=refused, reason=reason) if refused:
                notes["refused"] = (refused, reason)
            case effects.ReleasePayloads(payloads=payloads):
                notes["released"] = payloads
            case effects.NoteFiltered(groups=groups):
                notes["filtered"] = groups
            case effects.NoteEvaluation(result=result):
                notes.setdefault("evaluations", []).append(msgspec.structs.asdict(result))
            case effects.EvictMember(member=member, reason=reason):
                notes.setdefault("evicted", []).append((member, reason))
            case effects.Log(level=level, line=line) if level != "debug":
                notes.setdefault("said", []).append(line)
            case effects.FailRun(sentence=sentence):
                notes["failed"] = sentence
            case pool.GrantDevices(member=member, request=request, devices=devices):
                notes.setdefault("granted", []).append((member, request, devices))
            case pool.WakeWorker(member=member, order=order) | pool.SleepWorker(member=member, order=order):
                notes.setdefault("ordered", []).append((member, order.number, order.action, order.devices))
            case pool.FenceMember(member=member, reason=reason):
                notes.setdefault("fenced", []).append((member, reason))
            case pool.Log(level=level, message=line) if level != "info":
                notes.setdefault("said", []).append(line)
    return _encode(notes) if notes else b""
