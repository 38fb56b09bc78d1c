"""What the journal keeps of a decision beside its event: replay decides again, a story cannot."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control import effects
from penstock.control.effects import Effect
from penstock.wire.messages import BatchReady, Delivered, Leased

_encode = msgspec.msgpack.Encoder().encode


def noteworthy(decided: list[Effect]) -> bytes:
    """What a story wants to know beyond the event itself, small: who got which samples, what a batch was made of."""
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
    return _encode(notes) if notes else b""
