"""The journal of a run through the same machines once more: every decision must come out as it did."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.config.load import load
from penstock.control.events import Event
from penstock.control.notes import noteworthy
from penstock.journal.reader import history
from penstock.records.ids import PipelineName
from penstock.roles.controller import machine_of
from penstock.runtime.rundir import RunDir
from penstock.wire.codec import decode_section

_decode = msgspec.msgpack.Decoder(Event, dec_hook=decode_section).decode


class Replayed(msgspec.Struct):
    """What a replay found."""

    events: int = 0
    decisions: int = 0
    """Events whose outcome was noted, and compared."""
    elsewhere: int = 0
    """Events of the device pool, which are not replayed."""
    took_s: float = 0.0
    lines: list[str] = []
    problem: str = ""


def replay_run(root: Path, until_s: float | None = None) -> Replayed:
    """Replays a run directory, up to `until_s` seconds after its first event, and tells the state then."""
    run = RunDir.open(root)
    config = load(run.config_path)
    machines = {PipelineName(one.name): machine_of(one, config.control) for one in config.pipeline}
    found = Replayed()
    first: float | None = None
    now = 0.0
    for entry in history(run.journal_path):
        first = entry.at if first is None else first
        if until_s is not None and entry.at - first > until_s:
            break
        now = entry.at
        found.took_s = now - first
        machine = machines.get(entry.pipeline)
        if machine is None:
            found.elsewhere += 1
            continue
        event = _decode(entry.body)
        decided = noteworthy(machine.handle(event, entry.at))
        found.events += 1
        found.decisions += bool(entry.decided)
        if decided != entry.decided:
            found.problem = (
                f"event {entry.seq} of {entry.pipeline} ({type(event).__name__}) was decided otherwise: on record "
                f"{_readable(entry.decided)}, now {_readable(decided)}"
            )
            break
    at = now if until_s is None or first is None else first + until_s
    for name, machine in machines.items():
        machine.check()
        status = machine.status(at)
        words = ("phase", "step", "version", "prompts_issued", "in_flight", "workers_alive", "trainer_alive")
        found.lines.append(f"{name}: " + ", ".join(f"{word} {status[word]}" for word in words))
        found.lines.append(f"{name}: {machine.diagnose(at)}")
    return found


def _readable(decided: bytes) -> object:
    return msgspec.msgpack.decode(decided) if decided else None
