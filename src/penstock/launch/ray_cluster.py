"""Access to a Ray cluster: connecting to it, surveying its nodes, waiting for the results of remote calls."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray  # type: ignore[import-not-found]
from ray.exceptions import RayError  # type: ignore[import-not-found]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.launch.placing import Node
from penstock.launch.ray_host import Survey, clear_node, survey_node
from penstock.runtime.rundir import RunDir

log = logging.getLogger(__name__)

NAMESPACE = "penstock"
LOCAL = "local"
CONNECT_S = 10.0
SURVEY_S = 60.0
CLEAR_S = 10.0
NODE_LABEL = "ray.io/node-id"
HEAD = {"node:__internal_head__": 0.001}
"""A resource that only the head node has."""

REMOTE_SURVEY: Any = ray.remote(num_cpus=0, max_retries=0)(survey_node)
REMOTE_CLEAR: Any = ray.remote(num_cpus=0, max_retries=0)(clear_node)


def check_address(configured: str) -> str:
    """The address of the cluster, or `local` to start Ray on this machine. Raises `ConfigError` if nothing listens."""
    address = configured or os.environ.get("RAY_ADDRESS", "") or LOCAL
    host, colon, port = address.rpartition(":")
    if address in (LOCAL, "auto"):
        return address
    if not colon or not port.isdigit() or "://" in address:
        raise ConfigError(
            f"launch.address {address!r}: expected host:port or 'auto'; a run is started from a node of its cluster"
        )
    try:  # Ray would retry for minutes
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(_no_answer(address, error)) from error
    return address


def _no_answer(address: str, error: Exception) -> str:
    return (
        f"no Ray cluster answers at {address!r} ({first_line(error)}); start one with `ray start --head`, give its "
        "address in launch.address or RAY_ADDRESS, or leave both empty to start Ray on this machine"
    )


@contextmanager
def connected(configured: str, cpus: float) -> Iterator[str]:
    """Connects to the cluster, or starts a local Ray with `cpus` that ends with the context. Yields a description."""
    address = check_address(configured)
    own = {"num_cpus": max(int(cpus + 1), os.cpu_count() or 1), "include_dashboard": False} if address == LOCAL else {}
    _silence()
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **own,
        )
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(_no_answer(address, error)) from error
    try:
        yield "a local Ray on this machine" if address == LOCAL else f"the Ray cluster at {address}"
    finally:
        ray.shutdown()


def _silence() -> None:
    """Keeps Ray's messages about its nodes out of the terminal: they overwrite the view. Ray has no option for that."""
    with suppress(ImportError):
        importlib.import_module("ray._private.worker")._worker_logs_enabled = False  # type: ignore[attr-defined]


async def result(reference: Any, timeout_s: float) -> Any:
    """The result of a remote call, within `timeout_s`. A `PenstockError` of the call is raised unchanged."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(reference.future())
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, PenstockError):
            raise cause from None
        raise


async def survey(run: RunDir, only: str | None = None) -> list[Node]:
    """All live nodes, or the node `only`, with their surveys. Also removes leftovers of dead runs there."""
    found = [one for one in ray.nodes() if one["Alive"] and only in (None, one["NodeID"])]
    calls = [
        REMOTE_SURVEY.options(scheduling_strategy=_on(one["NodeID"])).remote(str(run.root), run.run_id) for one in found
    ]
    answers = await asyncio.gather(*(result(one, SURVEY_S) for one in calls), return_exceptions=True)
    return [_node(one, answer) for one, answer in zip(found, answers, strict=True)]


def living(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that are still alive in the cluster."""
    alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    return [node for node in nodes if node.id in alive]


async def clear(run: RunDir, nodes: Sequence[Node]) -> None:
    """Removes files of the run on the nodes, except for its directory."""
    nodes = [node for node in living(nodes) if not node.trouble]
    calls = [REMOTE_CLEAR.options(scheduling_strategy=_on(node.id)).remote(run.run_id) for node in nodes]
    answers = await asyncio.gather(*(result(one, CLEAR_S) for one in calls), return_exceptions=True)
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, BaseException):
            log.info("node %s could not be cleared: %s", node.address, first_line(answer))


def selector(allowed: Sequence[Node], nodes: Sequence[Node]) -> dict[str, str]:
    """Labels that restrict work to the allowed nodes; empty if all are allowed, so that nodes may join later."""
    if len(allowed) == len(nodes):
        return {}
    return {NODE_LABEL: f"in({','.join(node.id for node in allowed)})"}


def first_line(error: BaseException) -> str:
    """The first line of an error message: Ray's messages have many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def free_resources() -> Mapping[str, float]:
    return ray.available_resources()


def _on(node_id: str) -> Any:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _node(found: dict[str, Any], answer: Survey | BaseException) -> Node:
    resources = found["Resources"]
    node = (found["NodeID"], found["NodeManagerAddress"], resources.get("CPU", 0.0), int(resources.get("GPU", 0)))
    if isinstance(answer, TimeoutError):
        return Node(*node, trouble=f"it did not answer within {SURVEY_S:g} s")
    if isinstance(answer, BaseException):
        return Node(*node, trouble=str(answer).strip().splitlines()[-1])
    if answer.version != penstock.__version__:
        return Node(*node, trouble=f"it has Penstock {answer.version}, expected {penstock.__version__}")
    return Node(*node, sees_directory=answer.sees_directory, is_head=any(name in resources for name in HEAD))
