"""A run on a Ray cluster: its supervisor is an actor of the cluster; terminals attach and detach.

The actor is detached, so the run outlives its launcher. When its node is lost, Ray restarts the actor on another node,
and the run resumes as with `--resume`. The run directory records how the run ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import threading
import time
import warnings
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]
import uvloop
from ray.exceptions import ActorDiedError, RayError  # type: ignore[import-not-found]

from penstock.config.load import dump, load
from penstock.config.run import Config
from penstock.errors import ConfigError, PenstockError, RunFailed
from penstock.launch.placing import groups_of
from penstock.launch.ray_cluster import HEAD, NAMESPACE, check_address, connected, first_line, result, selector, survey
from penstock.launch.ray_placer import RayPlacer
from penstock.launch.supervisor import Outcome, View, exclusive, supervise
from penstock.runtime.logs import configure
from penstock.runtime.parent import watch_parent
from penstock.runtime.rundir import RunDir, write_atomically
from penstock.runtime.shutdown import ShutdownSignal

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.5
CALL_S = 10.0
SILENCE_S = 120.0
QUIET_S = 15.0
"""After this long without an answer the user sees how to resume: Ray kills clients that lost its head node."""

TERMINALS = 4
"""Concurrent calls of the actor."""

LINGER_S = 5.0
"""How long a supervisor stays after the end, so that terminals can read the last snapshot."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The status of a run, and the notes that a terminal has not shown yet."""

    incarnation: str
    """Of the supervisor: notes are counted per incarnation."""
    status: dict[str, Any]
    notes: list[str]
    failure: PenstockError | None
    """Why the supervisor failed."""


class KeptView:
    """Keeps the status and the notes for terminals, which poll them at any time."""

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(4)
        self.status: dict[str, Any] = {}
        self.notes: list[str] = []

    def update(self, status: dict[str, Any]) -> None:
        self.status = status

    def note(self, line: str) -> None:
        self.notes = [*self.notes, line]

    def close(self) -> None:
        pass


class RunActor:
    """Supervises a run in a separate thread; its methods are called by terminals."""

    def __init__(self, run_root: str) -> None:
        watch_parent(os.getppid())
        self._run = RunDir.open(Path(run_root))
        self._view = KeptView()
        self._stop = ShutdownSignal()
        self._failure: PenstockError | None = None
        configure("supervisor", self._run.log_path("supervisor"), logging.INFO)
        if _was_restarted():
            self._view.note("the supervisor was lost and started again: the run resumes from its journal")
        threading.Thread(target=self._supervise_and_exit, name="supervise", daemon=True).start()

    def snapshot(self, incarnation: str, notes_seen: int) -> Snapshot:
        view = self._view
        return Snapshot(
            view.incarnation,
            view.status,
            view.notes[notes_seen if incarnation == view.incarnation else 0 :],
            self._failure,
        )

    def stop(self, reason: str) -> None:
        self._stop.request(reason)

    def _supervise_and_exit(self) -> None:
        try:
            if self._run.read_ending() is None:  # otherwise the actor was lost after the end of the run
                self._supervise()
        except PenstockError as error:
            self._failure = error
        except Exception as error:
            log.exception("the supervisor failed")
            self._failure = RunFailed(f"the supervisor failed: {type(error).__name__}: {error}")
        time.sleep(LINGER_S)
        # Ray does not restart an actor that is killed this way.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _supervise(self) -> None:
        config = load(self._run.config_path)
        placer = RayPlacer(self._run, config, self._view.note)
        with exclusive(self._run), self._run.with_new_token():
            uvloop.run(supervise(self._run, config, placer, self._view, self._stop))


def _was_restarted() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own code uses a deprecated call
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _cluster_path(run: RunDir) -> Path:
    return run.root / "ray.json"


def _name_of(run: RunDir) -> str:
    return f"run:{run.run_id}"


def _find(run: RunDir) -> Any | None:
    """The supervisor of the run, or None if it is not on this cluster."""
    try:
        return ray.get_actor(_name_of(run), namespace=NAMESPACE)
    except ValueError:
        return None


def check(config: Config) -> None:
    """Raises `ConfigError` if no cluster listens at the configured address. Call before creating the run directory."""
    check_address(config.launch.address)


async def run_on_ray(run: RunDir, config: Config, view: View) -> Outcome:
    """Starts the run on the cluster, or attaches to it, and shows it until it ends. A signal stops it gracefully."""
    needed_cpus = sum(group.needs.cpus * len(group.members) for group in groups_of(config, with_gpus=False))
    with closing(view), connected(config.launch.address, needed_cpus) as cluster:
        stop = ShutdownSignal()
        stop.install()
        actor = _find(run)
        if actor is not None and run.read_ending() is None and await _answers(actor):
            view.note(f"the run is alive on {cluster}: watching it")
        else:
            await _kill_supervisor(run)
            run.write_config(dump(config))
            write_atomically(_cluster_path(run), json.dumps({"address": ray.get_runtime_context().gcs_address}))
            view.note(f"on {cluster}; watch it from elsewhere with: penstock attach {run.root}")
            actor = await _launch(run)
        outcome = await _follow(run, actor, view, stop, stops=True)
        assert outcome is not None
        return outcome


async def attach(run: RunDir, view: View, *, stop: bool) -> Outcome | None:
    """Shows a run until it ends. On a signal, returns None and leaves it running. With `stop`, stops the run first."""
    with closing(view):
        ending = run.read_ending()
        if ending is not None:
            return _outcome(ending)
        try:
            address = json.loads(_cluster_path(run).read_text(encoding="utf-8"))["address"]
        except FileNotFoundError:
            raise ConfigError(f"{run.root} is not a run on Ray; watch it where it was started") from None
        with connected(address, cpus=0):
            signals = ShutdownSignal()
            signals.install()
            actor = _find(run)
            if actor is None:
                raise RunFailed(f"the Ray cluster at {address} has no record of this run; {_resume_hint(run)}")
            view.note("watching the run" + ("" if stop else "; Ctrl-C leaves it running"))
            if stop:
                signals.request("stopped by `penstock attach --stop`")
            return await _follow(run, actor, view, signals, stops=stop)


async def _launch(run: RunDir) -> Any:
    """Starts the supervisor on a node with access to the run directory: the head node if possible, since a cluster does
    not survive its loss anyway."""
    nodes = await survey(run)
    usable = [node for node in nodes if node.sees_directory and not node.trouble]
    if not usable:
        troubles = "; ".join(f"{node.address}: {node.trouble or 'no access'}" for node in nodes)
        raise RunFailed(f"no node of the cluster can use the run directory {run.root} ({troubles})")
    run.ending_path.unlink(missing_ok=True)
    head = next((node for node in usable if node.is_head), None)
    where = {"resources": HEAD} if head is not None else {"label_selector": selector(usable, nodes)}
    actor: Any = ray.remote(RunActor)
    detached = {"name": _name_of(run), "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1}
    return actor.options(num_cpus=0, max_concurrency=TERMINALS, **detached, **where).remote(str(run.root))


async def _follow(run: RunDir, actor: Any, view: View, stop: ShutdownSignal, *, stops: bool) -> Outcome | None:
    """Shows the run until it ends, and returns its outcome. On a signal, stops the run gracefully if `stops` is set;
    otherwise returns None and leaves the run running.

    Consumes: snapshots of the supervisor. Produces: the view's updates. Waits for: the end of the run.
    Unblocked by: the end, a signal, or no answer from the supervisor for `SILENCE_S`.
    """
    incarnation, notes_seen, answered_at, warned = "", 0, time.monotonic(), False
    while (ending := run.read_ending()) is None:
        if stop.requested and not stops:
            return None
        try:
            if stop.requested:
                await result(actor.stop.remote(stop.reason), CALL_S)
            snapshot: Snapshot = await result(actor.snapshot.remote(incarnation, notes_seen), CALL_S)
        except ActorDiedError as error:
            if run.read_ending() is None:
                raise RunFailed(
                    f"the supervisor of the run has died ({first_line(error)}); {_resume_hint(run)}"
                ) from error
        except (RayError, TimeoutError) as error:
            silent_s = time.monotonic() - answered_at
            if silent_s > QUIET_S and not warned:
                warned = True
                view.note(
                    f"the supervisor of the run has not answered for {silent_s:.0f} s. If the cluster's head node is "
                    f"lost, the run is lost too; then, on another cluster, {_resume_hint(run)}"
                )
            if silent_s > SILENCE_S:
                raise RunFailed(
                    f"the supervisor of the run has not answered for {SILENCE_S:g} s ({first_line(error)}): its node "
                    f"may be lost, and no other node has access to {run.root}. When one has, {_resume_hint(run)}"
                ) from error
        else:
            if snapshot.failure is not None:
                raise snapshot.failure
            answered_at, warned = time.monotonic(), False
            notes_seen = (
                notes_seen + len(snapshot.notes) if snapshot.incarnation == incarnation else len(snapshot.notes)
            )
            incarnation = snapshot.incarnation
            for line in snapshot.notes:
                view.note(line)
            if snapshot.status:
                view.update(snapshot.status)
        await asyncio.sleep(POLL_EVERY_S)
    return _outcome(ending)


async def _kill_supervisor(run: RunDir) -> None:
    """Kills a supervisor that has finished, or that waits for a node that may never join."""
    deadline = time.monotonic() + SILENCE_S
    while (actor := _find(run)) is not None:
        if time.monotonic() > deadline:
            raise RunFailed(f"the previous supervisor of {run.root} does not end; stop the actor {_name_of(run)!r}")
        ray.kill(actor, no_restart=True)
        await asyncio.sleep(POLL_EVERY_S)


async def _answers(actor: Any) -> bool:
    """Whether the supervisor answers a call."""
    try:
        await result(actor.snapshot.remote("", 0), CALL_S)
    except (RayError, TimeoutError):
        return False
    return True


def _outcome(ending: dict[str, Any]) -> Outcome:
    if ending["how"] == "failed":
        raise ConfigError(ending["sentence"]) if ending["mistake"] else RunFailed(ending["sentence"])
    return Outcome(ending["status"], ending["how"] == "interrupted", ending["wall_s"])


def _resume_hint(run: RunDir) -> str:
    return f"resume with: penstock run --resume {run.root}"
