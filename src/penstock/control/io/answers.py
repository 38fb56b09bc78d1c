"""Translation between what a machine decides and what leaves the process: replies, and notes for stories."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control import effects
from penstock.control.effects import Effect
from penstock.errors import RunFailed
from penstock.wire import messages
from penstock.wire.messages import Refused, Reply

_encode = msgspec.msgpack.Encoder().encode


def noteworthy(decided: list[Effect]) -> bytes:
    """What a story wants to know beyond the event itself, small: who got which samples, what a batch was made of."""
    notes: dict[str, Any] = {}
    for effect in decided:
        match effect:
            case effects.GrantLeases(leases=leases):
                what = "evaluation_leases" if leases[0].evaluation is not None else "leases"
                notes[what] = [(lease.prompt, lease.attempt, lease.samples) for lease in leases]
            case effects.GiveBatch(batch=batch):
                notes["batch"] = [(group.prompt, group.attempt, group.samples) for group in batch.groups]
            case effects.AcceptDelivery(refused=refused, reason=reason) if refused:
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


def reply(answer: Effect) -> Reply:
    """The answer to a call, in the words of the wire."""
    match answer:
        case effects.GrantLeases(leases=leases, phase=phase):
            return messages.Leased(leases, "granted", phase)
        case effects.AcceptDelivery(refused=refused, reason=reason):
            return messages.Delivered(refused, reason)
        case effects.RefuseLease(verdict=verdict, phase=phase):
            return messages.Leased((), verdict, phase)
        case effects.AcceptHeartbeat(known=known, phase=phase):
            return messages.Beaten(known, phase)
        case effects.GiveBatch(batch=batch, rings=rings):
            return messages.BatchReady(batch, rings)
        case effects.DeferBatch(waiting_for=waiting_for, phase=phase):
            return messages.NotYet(waiting_for, phase)
        case effects.ConfirmComplete(steps=steps):
            return messages.Complete(steps)
        case effects.AcceptMember(phase=phase, version=version, step=step):
            return messages.Registered(phase, version, step)
        case effects.RefuseCall(kind=kind, message=message):
            return Refused(kind, message)
        case effects.Confirm():
            return messages.Ok()
    raise RunFailed(f"the control machine answered a call with {answer!r}, which is no answer")
