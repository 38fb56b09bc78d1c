"""Faults as a list, each with its time, so that a failing storm can be minimised one fault at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec

from penstock.payload.io.memory import Trouble
from penstock.sim.parts import EngineFaults
from penstock.sim.system import System

POLL_EVERY_S = 0.02


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault at one time."""

    at_s: float
    what: str
    target: str = ""
    """A process by its name in the run; empty: the whole system, or the first that fits."""
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        target = f" {self.target}" if self.target else ""
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        return f"at {self.at_s:g} s: {self.what}{target}{lasts}" + (f" ({self.amount:g})" if self.amount else "")


KINDS: dict[str, Callable[[System, Fault], Callable[[], None] | None]] = {}
"""By name: a function that applies a fault and returns the function that undoes it after `for_s`."""


def fault(function: Callable[[System, Fault], Callable[[], None] | None]) -> Callable[..., object]:
    KINDS[function.__name__] = function
    return function


@fault
def kill(system: System, one: Fault) -> None:
    system.kill(one.target)


@fault
def stop(system: System, one: Fault) -> Callable[[], None] | None:
    placed = system.placed.get(one.target)
    if placed is None:
        return None
    placed.process.stop()
    return placed.process.resume


@fault
def cut(system: System, one: Fault) -> Callable[[], None]:
    """Cuts the process and its heartbeat off the network."""
    names = [one.target, f"{one.target}.heart"]
    for name in names:
        system.network.cut[name] = system.network.cut.get(name, 0) + 1

    def heal() -> None:
        for name in names:
            system.network.cut[name] -= 1
            if not system.network.cut[name]:
                del system.network.cut[name]

    return heal


def _condition(field: str) -> Callable[[System, Fault], Callable[[], None]]:
    def apply(system: System, one: Fault) -> Callable[[], None]:
        default = {"latency_s": system.work.latency_s, "commit_s": system.work.commit_s}.get(field, 0.0)
        active = system.active[field]  # faults overlap: each ends separately, and the last restores the default
        active.append(one.amount)
        setattr(system.conditions, field, one.amount)

        def end() -> None:
            active.remove(one.amount)
            setattr(system.conditions, field, active[-1] if active else default)

        return end

    return apply


KINDS |= {
    "lose": _condition("lose"),
    "reset": _condition("reset"),
    "repeat": _condition("repeat"),
    "corrupt": _condition("corrupt"),
    "latency": _condition("latency_s"),
    "slow_disk": _condition("commit_s"),
}


@fault
def full_disk(system: System, one: Fault) -> Callable[[], None]:
    system.conditions.disk_full = True
    return lambda: setattr(system.conditions, "disk_full", False)


@fault
def lying_disk(system: System, one: Fault) -> Callable[[], None]:
    """A flush returns without writing: a power failure loses the data written meanwhile."""
    system.conditions.flush_lies = True
    return lambda: setattr(system.conditions, "flush_lies", False)


@fault
def torn_journal(system: System, one: Fault) -> None:
    """The power fails while a lying disk writes the journal: its file is truncated in the middle."""
    power_off(system, one)
    path = system.run.journal_path
    system.disk.lost.append(path.name)
    os.truncate(path, path.stat().st_size // 2)


@fault
def sick_port(system: System, one: Fault) -> Callable[[], None] | None:
    """A payload port of a worker refuses, resets or does not answer, by `amount`: 0, 1 or 2."""
    net, placed = system.payload_net, system.placed.get(one.target)
    ports = [port for port, owner in net.owners.items() if placed is not None and owner is placed.process]
    if not ports:
        return None
    troubles: tuple[Trouble, ...] = ("refused", "reset", "silent")
    net.sick[ports[0]] = troubles[int(one.amount)]
    return lambda: net.sick.pop(ports[0], None) and None


def _engine_fault(field: str) -> Callable[[System, Fault], Callable[[], None] | None]:
    def change(system: System, one: Fault) -> Callable[[], None] | None:
        faults = system.engine_faults.get(one.target)
        if faults is None:
            return None
        setattr(faults, field, type(getattr(EngineFaults(), field))(one.amount or 1))
        return lambda: setattr(faults, field, getattr(EngineFaults(), field))

    return change


KINDS |= {
    "hang": _engine_fault("hang"),
    "hooks_fail": _engine_fault("hook_fails"),
    "slow": _engine_fault("slow"),
    "crash": _engine_fault("crash"),
    "tear": _engine_fault("tear"),
    "damage_memory": _engine_fault("damage"),
    "stuck_update": _engine_fault("stuck"),
    "wake_fails": _engine_fault("wake_fails"),
    "lie": _engine_fault("wrong_digest"),
}


@fault
def flip_prefetch(system: System, one: Fault) -> None:
    """Changes the live setting `rollout.prefetch`."""
    if system.service is not None:
        flags = system.service.prefetch
        system.service.prefetch = {name: not flags.get(name, True) for name in system.service.controller.pipelines}


@fault
def terminate(system: System, one: Fault) -> None:
    """Another process than the supervisor sends SIGTERM."""
    placed = system.placed.get(one.target)
    if placed is not None and placed.process.alive:
        system.loop.call_soon(placed.member.stop.request, "received SIGTERM", context=placed.process.context)


@fault
def hang_trainer(system: System, one: Fault) -> None:
    """Optimiser steps that begin now never end."""
    system.stuck_until = system.loop.time() + one.for_s


@fault
def cannot_start(system: System, one: Fault) -> None:
    """The worker dies, and cannot be built again."""
    system.engine_faults[one.target].builds = False
    system.kill(one.target)


@fault
def crash_loop(system: System, one: Fault) -> Callable[[], None]:
    """The process dies `amount` seconds after every start, while the fault lasts."""
    lasting = [True]

    def poll() -> None:
        placed = system.placed.get(one.target)
        if placed is not None and system.loop.time() - placed.process.started_at >= one.amount:
            system.kill(one.target)
        if lasting:
            system.loop.call_later(0.1, poll)

    poll()
    return lasting.clear


@fault
def power_off(system: System, one: Fault) -> None:
    """All processes die at once, including the supervisor; the run is resumed afterwards."""
    for name in list(system.placed):
        system.kill(name)
    system.disk.lose_power()
    for placed in system.placed.values():
        for path in placed.rings:
            path.unlink(missing_ok=True)
    system.truth.lose_points(after=system.disk.flushed_at)
    if not system.outage.done():
        system.outage.set_result(one.for_s)


@fault
def damage_weights(system: System, one: Fault) -> Callable[[], None]:
    """Flips one byte of the newest version's file, and of each new version's while the fault lasts."""
    damaged: set[Path] = set()
    lasting = [True]

    def poll() -> None:
        files = sorted((system.run.root / "weights").rglob("*.safetensors"), key=_written)[-1:]
        if files and files[0] not in damaged:
            damaged.add(files[0])
            _flip(files)
        if one.for_s and lasting:
            system.loop.call_later(POLL_EVERY_S, poll)

    poll()
    return lasting.clear


@fault
def damage_checkpoint(system: System, one: Fault) -> None:
    """Flips one byte of the newest checkpoint; the previous one stays whole."""
    kept = sorted((system.run.root / "checkpoints").rglob("step-*"), key=_written)
    _flip(sorted((path for path in kept[-1].rglob("*") if path.stat().st_size > 256), key=str) if kept else [])


@fault
def lose_host(system: System, one: Fault) -> None:
    """Kills a worker and removes its ring, as when its machine is lost."""
    unlink_ring(system, one)
    system.kill(one.target)


@fault
def unlink_ring(system: System, one: Fault) -> None:
    """Removes the files of a worker's rings; the worker stays alive."""
    placed = system.placed.get(one.target)
    system.truth.may_miss = True
    for path in placed.rings if placed is not None else []:
        path.unlink(missing_ok=True)


def _flip(files: list[Path]) -> None:
    if not files:
        return
    body = bytearray(files[-1].read_bytes())
    body[-1] ^= 0xFF
    files[-1].write_bytes(body)


def _written(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, str(path)


def storm(seed: int, workers: list[str], trainers: list[str], *, span_s: float, every_s: float) -> list[Fault]:
    """A mixed storm over the first `span_s` seconds, a fault about every `every_s`."""
    random = Random(f"{seed} storm")
    faults: list[Fault] = []
    at_s = 5.0 + random.expovariate(1 / every_s)
    while at_s < span_s:
        process = random.choice([*workers, *workers, *trainers, "controller"])
        worker = random.choice(workers)
        kinds: list[tuple[int, Fault]] = [
            (6, Fault(at_s, "kill", worker)),
            (4, Fault(at_s, "kill", random.choice(trainers))),
            (4, Fault(at_s, "kill", "controller")),
            (3, Fault(at_s, "stop", process, for_s=round(random.uniform(0.5, 30.0), 1))),
            (3, Fault(at_s, "cut", process, for_s=round(random.uniform(0.5, 40.0), 1))),
            (
                2,
                Fault(at_s, "lose", for_s=round(random.uniform(1, 20), 1), amount=round(random.uniform(0, 0.3), 2)),
            ),
            (2, Fault(at_s, "reset", for_s=round(random.uniform(1, 20.0), 1), amount=round(random.uniform(0, 0.3), 2))),
            (2, Fault(at_s, "repeat", for_s=round(random.uniform(1, 60), 1), amount=round(random.uniform(0, 0.5), 2))),
            (1, Fault(at_s, "latency", for_s=round(random.uniform(1, 20), 1), amount=round(random.uniform(0, 1.0), 2))),
            (1, Fault(at_s, "slow_disk", for_s=round(random.uniform(1, 10), 1), amount=round(random.uniform(0, 2), 2))),
            (2, Fault(at_s, "hang", worker, for_s=round(random.uniform(1, 60), 1))),
            (2, Fault(at_s, "hooks_fail", worker, for_s=round(random.uniform(1, 30), 1), amount=0.2)),
            (1, Fault(at_s, "slow", worker, for_s=round(random.uniform(1, 30), 1), amount=8.0)),
            (1, Fault(at_s, "corrupt", for_s=round(random.uniform(1, 20), 1), amount=0.1)),
            (1, Fault(at_s, "sick_port", worker, for_s=round(random.uniform(1, 60), 1), amount=random.randrange(3))),
            (1, Fault(at_s, "terminate", worker)),
            (1, Fault(at_s, "flip_prefetch")),
            (1, Fault(at_s, "damage_memory", worker, for_s=round(random.uniform(1, 10), 1))),
            (1, Fault(at_s, "tear", worker, for_s=round(random.uniform(1, 10), 1))),
            (1, Fault(at_s, "stuck_update", worker, for_s=round(random.uniform(1, 10), 1))),
            (1, Fault(at_s, "wake_fails", worker, for_s=round(random.uniform(1, 10), 1), amount=0.3)),
            (1, Fault(at_s, "lie", worker, for_s=round(random.uniform(1, 10), 1))),
            (2, Fault(at_s, "cut", f"{worker}.heart", for_s=round(random.uniform(5, 60), 1))),
            (1, Fault(at_s, "damage_checkpoint")),
            (2, Fault(at_s, "damage_weights", for_s=round(random.uniform(0, 10), 1))),
            (1, Fault(at_s, "lose_host", worker)),
            (1, Fault(at_s, "unlink_ring", worker)),
            (1, Fault(at_s, "power_off", for_s=5.0)),
        ]
        weights = [weight for weight, _ in kinds]
        drawn = random.choices([one for _, one in kinds], weights)[0]
        # One of the two kept checkpoints is always whole: without any, a run must fail.
        if drawn.what != "damage_checkpoint" or all(one.what != "damage_checkpoint" for one in faults):
            faults.append(drawn)
        at_s = round(at_s + random.expovariate(1 / every_s), 2)
    return faults


def crash_loops(seed: int, processes: list[str], *, span_s: float) -> list[Fault]:
    """One process that dies repeatedly soon after its start; drawn with a separate seed too."""
    random = Random(f"{seed} crashes")
    at_s, for_s = round(random.uniform(5.0, span_s), 2), round(random.uniform(5.0, 60.0), 1)
    return [Fault(at_s, "crash_loop", random.choice(processes), for_s=for_s, amount=round(random.uniform(0, 5), 1))]


def hangs(seed: int, workers: list[str], *, span_s: float) -> list[Fault]:
    """Trainers or a worker that make no progress until they are replaced; drawn with a separate seed too."""
    random = Random(f"{seed} hangs")
    at_s = round(random.uniform(5.0, span_s), 2)
    trainers = Fault(at_s, "hang_trainer", for_s=round(random.uniform(1.0, 10.0), 1))
    return [random.choice([trainers, Fault(at_s, "hang", random.choice(workers), for_s=120.0)])]


def disk_trouble(seed: int, trainers: list[str], *, span_s: float) -> list[Fault]:
    """Faults of the disk in the first `span_s` seconds; drawn with a separate seed, so that storms do not change."""
    random = Random(f"{seed} disk")
    at_s = round(random.uniform(8.0, span_s), 2)
    lasts_s = round(random.uniform(1.0, 20.0), 1)
    power_off = Fault(round(at_s + random.uniform(0.0, lasts_s), 2), "power_off", for_s=5.0)
    torn = Fault(round(at_s + random.uniform(0.0, lasts_s), 2), "kill", random.choice(trainers))
    slow = Fault(at_s, "slow_disk", for_s=lasts_s, amount=round(random.uniform(0.2, 3.0), 2))
    full = Fault(at_s, "full_disk", for_s=round(random.uniform(1.0, 60.0), 1))
    lying = Fault(at_s, "lying_disk", for_s=lasts_s)
    return random.choice([[power_off], [slow, torn], [slow, power_off], [full], [lying], [lying, power_off]])
