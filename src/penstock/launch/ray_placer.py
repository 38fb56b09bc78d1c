"""Processes on the nodes of a Ray cluster: one role host per process, in placement groups by required resources.

A host serves all incarnations of its process while its node is alive. If a node has no access to the run directory, the
files that the process needs are sent to the host, and the log of the process is copied back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray  # type: ignore[import-not-found]
from ray.exceptions import RayActorError, RayError  # type: ignore[import-not-found]
from ray.util import (  # type: ignore[import-not-found]
    get_placement_group,
    list_named_actors,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # type: ignore[import-not-found]

from penstock.config.run import Config
from penstock.errors import RunFailed, Transient
from penstock.journal.writer import is_in_use
from penstock.launch.placing import Group, Node, check_pool, groups_of, listens_outside, shortage, usable_nodes
from penstock.launch.processes import CONTROLLER, ProcessSpec
from penstock.launch.ray_cluster import clear, first_line, free_resources, living, result, selector, survey
from penstock.launch.ray_host import ProcessExit, RoleHost, RunFiles, StartOrder
from penstock.launch.restarts import Ended
from penstock.runtime.rundir import RunDir

log = logging.getLogger(__name__)

CALL_S = 10.0
PREVIOUS_PROCESSES_S = 60.0
POLL_S = 0.2
EXCHANGE_EVERY_S = 0.5
LAST_LOGS_S = 30.0
"""How long the rest of the logs may be copied at the end: a process that could not be killed may still write."""
REMOTE_HOST: Any = ray.remote(RoleHost)
HOST_CALLS = 4
"""Concurrent calls of a host: one of them always waits for the process to end."""

REMOTE_FILES = ("run.json", "config.toml")
"""Files of the run directory that a process reads, besides the address of the controller."""


@dataclass(slots=True)
class Host:
    """A role host and its node."""

    process: str
    actor: Any
    node: Node
    shares: bool
    """It has access to the run directory."""
    log_bytes: int = 0
    """Bytes of the process's log that were copied back."""
    lost: bool = False

    def end(self) -> None:
        """Kills the host; the kernel then kills its process. An unreachable host counts as dead."""
        self.lost = True
        ray.kill(self.actor)


class RayProcess:
    """One incarnation of a process, started by its host."""

    def __init__(self, run: RunDir, host: Host, pid: int) -> None:
        self._run = run
        self._host = host
        self._ended = asyncio.wrap_future(host.actor.wait.remote(host.process).future())
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # possibly no caller waits
        self.where = f"process {pid} on node {host.node.address}"

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> Ended:
        try:
            ended: ProcessExit = await asyncio.shield(self._ended)
        except RayActorError as error:
            log.info("%s was lost with its host: %s", self._host.process, first_line(error))
            self.kill()  # it may only be unreachable, and must not return
            return Ended(-9, lost=f"its place on node {self._host.node.address} was lost")
        if ended.failure_report is not None:
            report = ended.failure_report
            self._run.write_failure(self._host.process, report["kind"], report["message"], report["exit_code"])
        return Ended(ended.exit_code)

    def terminate(self) -> None:
        self._host.actor.terminate.remote()

    def kill(self) -> None:
        self._host.end()

    async def kill_tree(self, timeout_s: float) -> None:
        try:
            await result(self._host.actor.kill_tree.remote(timeout_s), 2 * timeout_s)
        except (RayError, TimeoutError) as error:
            log.info("%s is ended with its host: %s", self._host.process, first_line(error))
            self.kill()


class RayPlacer:
    """Reserves resources for all processes before the first one starts, and releases them at the end."""

    def __init__(self, run: RunDir, config: Config, note: Callable[[str], None]) -> None:
        self._run = run
        self._config = config
        self._note = note
        self._nodes: list[Node] = []
        self._outside = False
        self._places: dict[str, tuple[Group, Any, int]] = {}
        """Of each process: its group, the placement group, and the index of its bundle."""
        self._hosts: dict[str, Host] = {}

    async def open(self) -> None:
        await self._end_previous_processes()
        self._nodes = await survey(self._run)
        await clear(self._run, self._nodes)
        groups = groups_of(self._config, with_gpus=any(node.gpus for node in self._nodes))
        check_pool(self._config, groups)
        self._outside = listens_outside(self._nodes)
        if self._outside:
            addresses = ", ".join(sorted({node.address for node in self._nodes if not node.trouble}))
            self._note(f"the run listens on the network, protected by its token but not encrypted: {addresses}")
        for node in self._nodes:
            if node.trouble:
                self._note(f"node {node.address} is not used: {node.trouble}")
        for group in groups:
            self._reserve(group)
        await self._all_reserved(groups)

    def _reserve(self, group: Group) -> None:
        needs = {"CPU": group.needs.cpus} | ({"GPU": group.needs.gpus} if group.needs.gpus else {})
        nodes = usable_nodes(group, self._nodes)
        if not nodes:
            raise RunFailed(shortage([group], self._nodes, free_resources(), waited_s=0.0))
        labels = selector(nodes, self._nodes)
        places = placement_group(
            [needs] * len(group.members),
            strategy=group.strategy,
            name=f"{self._prefix}{group.name}",
            bundle_label_selector=[labels] * len(group.members),
        )
        for index, member in enumerate(group.members):
            self._places[member] = (group, places, index)

    async def _all_reserved(self, groups: Iterable[Group]) -> None:
        wait_s = self._config.launch.wait_s
        began, waiting, noted = time.monotonic(), list(groups), False
        while waiting := [one for one in waiting if not self._is_reserved(one)]:
            if time.monotonic() - began > wait_s:
                raise RunFailed(shortage(waiting, self._nodes, free_resources(), wait_s))
            if not noted and time.monotonic() - began > CALL_S:
                self._note(f"waiting for a place for {', '.join(one.name for one in waiting)}, {wait_s:g} s at most")
                noted = True
            await asyncio.sleep(POLL_S)

    def _is_reserved(self, group: Group) -> bool:
        return placement_group_table(self._places[group.members[0]][1])["state"] == "CREATED"

    async def place(self, spec: ProcessSpec, member: str, session: str) -> RayProcess:
        wait_s = self._config.launch.wait_s
        deadline = time.monotonic() + wait_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                alone = replace(self._places[spec.name][0], name=spec.name, members=(spec.name,))
                raise Transient(shortage([alone], living(self._nodes), free_resources(), wait_s))
            host = self._hosts.get(spec.name)
            try:
                if host is None or host.lost:
                    host = self._hosts[spec.name] = await self._new_host(spec, left_s)
                if spec.role == CONTROLLER.role:
                    await self._wait_for_journal(left_s)
                pid = await result(host.actor.start.remote(self._order(spec, member, session, host)), CALL_S)
                return RayProcess(self._run, host, pid)
            except (RayActorError, TimeoutError) as error:
                log.info("%s could not be started, trying again: %s", spec.name, first_line(error))
                if host is not None:
                    host.end()
                await asyncio.sleep(POLL_S)

    async def _wait_for_journal(self, timeout_s: float) -> None:
        """Waits for the previous controller: if unreachable, it may stay alive until Ray declares its node dead."""
        deadline = time.monotonic() + timeout_s
        while is_in_use(self._run.journal_path):
            if time.monotonic() > deadline:
                raise Transient(f"the previous controller, on an unreachable node, holds {self._run.journal_path}")
            await asyncio.sleep(POLL_S)

    async def _new_host(self, spec: ProcessSpec, timeout_s: float) -> Host:
        group, places, index = self._places[spec.name]
        actor = REMOTE_HOST.options(
            name=f"{self._prefix}{spec.name}:{secrets.token_hex(3)}",
            max_concurrency=HOST_CALLS,
            num_cpus=group.needs.cpus,
            num_gpus=group.needs.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=index),
        ).remote()
        try:
            shares = await result(actor.open.remote(str(self._run.root), self._run.run_id), timeout_s)
            node = await self._node_of(placement_group_table(places)["bundles_to_node_id"][index])
            host = Host(spec.name, actor, node, shares)
            if not shares:
                await self._create_directory(host, group)
        except BaseException:
            ray.kill(actor)
            raise
        return host

    async def _create_directory(self, host: Host, group: Group) -> None:
        if group.needs.directory:
            raise RunFailed(
                f"node {host.node.address} was assigned to {host.process} but has no access to the run directory "
                f"{self._run.root}: put run.dir on a file system that all nodes share, and resume there"
            )
        files = {name: (self._run.root / name).read_text(encoding="utf-8") for name in REMOTE_FILES}
        folder = await result(host.actor.create_directory.remote(RunFiles(self._run.run_id, files)), CALL_S)
        path = self._run.log_path(host.process)
        log.info("%s on node %s logs to %s there, copied to %s", host.process, host.node.address, folder, path)

    async def _node_of(self, node_id: str) -> Node:
        """The node, surveyed first if it has joined since the start."""
        if node_id not in {node.id for node in self._nodes}:
            self._nodes = [*self._nodes, *await survey(self._run, only=node_id)]
        node = next(node for node in self._nodes if node.id == node_id)
        if listens_outside(self._nodes) and not self._outside:
            raise RunFailed(
                f"node {node.address} is another machine and joined after the run had started on one machine, where it "
                "listens on loopback only: resume the run to use that node too"
            )
        return node

    def _order(self, spec: ProcessSpec, member: str, session: str, host: Host) -> StartOrder:
        return StartOrder(
            spec,
            member,
            session,
            host=host.node.address if self._outside else "",
            gpus=self._places[spec.name][0].needs.gpus,
            extra_path=tuple(map(str, self._config.run.extra_path)),
            token=self._run.token(),
        )

    async def run(self) -> None:
        """Sends the controller's address to hosts without access to the run directory, and copies their logs back."""
        while True:
            await self._exchange()
            await asyncio.sleep(EXCHANGE_EVERY_S)

    async def _exchange(self) -> bool:
        """Whether a log grew: then there may be more to copy."""
        remote = [host for host in self._hosts.values() if not host.shares and not host.lost]
        if not remote:
            return False
        path = self._run.endpoint_path
        endpoint = path.read_text(encoding="utf-8") if path.exists() else None
        calls = [host.actor.exchange.remote(host.process, endpoint, host.log_bytes) for host in remote]
        answers = await asyncio.gather(*(result(call, CALL_S) for call in calls), return_exceptions=True)
        grew = False
        for host, answer in zip(remote, answers, strict=True):
            if isinstance(answer, BaseException):
                log.info("nothing was exchanged with the host of %s: %s", host.process, first_line(answer))
                continue
            grew = grew or bool(answer)
            host.log_bytes += len(answer)
            with self._run.log_path(host.process).open("ab") as copy:
                copy.write(answer)
        return grew

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_LOGS_S):
                while await self._exchange():
                    pass
        for host in self._hosts.values():
            host.end()
        for places in {id(places): places for _, places, _ in self._places.values()}.values():
            remove_placement_group(places)
        await clear(self._run, self._nodes)

    async def _end_previous_processes(self) -> None:
        """Removes processes of a previous supervisor: one that was lost with its node is restarted on another node."""
        for info in placement_group_table().values():
            if info["name"].startswith(self._prefix) and info["state"] != "REMOVED":
                with suppress(ValueError):  # it was removed in the meantime
                    remove_placement_group(get_placement_group(info["name"]))
        deadline = time.monotonic() + PREVIOUS_PROCESSES_S
        while names := [name for name in list_named_actors() if name.startswith(self._prefix)]:
            if time.monotonic() > deadline:
                raise RunFailed(f"processes of the previous supervisor of this run do not end: {', '.join(names)}")
            for name in names:
                with suppress(ValueError):
                    ray.kill(ray.get_actor(name))
            await asyncio.sleep(POLL_S)

    @property
    def _prefix(self) -> str:
        return f"{self._run.run_id}:"
