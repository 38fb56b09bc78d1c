"""Versions over UCX: verified, refused without the token, undisturbed by removal, bounded if the trainer is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from running import outside_address

pytest.importorskip("ucxx")

from penstock.errors import RemoteProtocolError, Stale, Transient
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.runtime import ucx as ucxx_core
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import Publisher
from penstock.weights.io.pull import PullTransport
from penstock.weights.io.pull_ucxx import UcxxArtifactServer, UcxxConnection

TOKEN = b"secret"
DEADLINE_S = 60.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(1500, 1500, generator=generator),  # more than one message
        **{f"layer.{i}": torch.randn(257, 30 + i, generator=generator) for i in range(6)},
        "empty": torch.zeros(0),
        "scalar": torch.tensor(float(seed)),
    }


def transport(token: bytes = TOKEN) -> PullTransport:
    return PullTransport(token, ucxx=UcxxConnection(token, ucxx_core))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UcxxArtifactServer]:
    server = UcxxArtifactServer(tmp_path, TOKEN, ucxx_core, keep=2)
    yield server
    server.close(10.0)
    assert not [thread.name for thread in threading.enumerate() if thread.name == "weights-ucxx"]


def published(run_dir: Path, server: UcxxArtifactServer, version: int) -> Manifest:
    publisher = Publisher(run_dir, "l1", keep=1, bucket_bytes=900_000, ucxx_addresses=(server.address,))
    manifest = publisher.publish(Version(version), tensors(version))
    server.offer(manifest)
    return manifest


def test_versions_arrive_one_after_the_other_and_removed_ones_while_they_are_offered(
    tmp_path: Path, server: UcxxArtifactServer
) -> None:
    pulling = transport()
    first = published(tmp_path, server, 1)
    assert digest_of(pulling.fetch(first, DEADLINE_S)) == first.digest
    second = published(tmp_path, server, 2)
    assert digest_of(pulling.fetch(second, DEADLINE_S)) == second.digest
    assert not (tmp_path / first.directory).exists()
    assert digest_of(pulling.fetch(first, DEADLINE_S)) == first.digest
    published(tmp_path, server, 3)
    with pytest.raises(Stale, match="newest"):
        pulling.fetch(first, DEADLINE_S)
    assert server.served_bytes == 3 * sum(tensor.nbytes for tensor in tensors(1).values())


def test_unknowns_are_refused_and_others_still_served(tmp_path: Path, server: UcxxArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    with pytest.raises(RemoteProtocolError, match="wrong token"):
        transport(b"guess").fetch(manifest, DEADLINE_S)
    assert server.refusals == 1
    assert digest_of(transport().fetch(manifest, DEADLINE_S)) == manifest.digest


def test_a_server_on_loopback_is_out_of_reach_by_other_interfaces(tmp_path: Path, server: UcxxArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    elsewhere = server.address.replace("127.0.0.1", outside_address())
    with pytest.raises(Transient):
        transport().fetch(msgspec.structs.replace(manifest, ucxx_addresses=(elsewhere,)), 3.0)
    assert server.served_bytes == 0
    assert digest_of(transport().fetch(manifest, DEADLINE_S)) == manifest.digest


def test_a_closed_server_frees_its_port_whatever_its_connections_were_doing(tmp_path: Path) -> None:
    server = UcxxArtifactServer(tmp_path, TOKEN, ucxx_core, keep=2)
    manifest = published(tmp_path, server, 1)
    idle = transport()
    assert digest_of(idle.fetch(manifest, DEADLINE_S)) == manifest.digest
    port = int(server.address.rpartition(":")[2])
    worker = ucxx_core.Worker()
    unknown = ucxx_core.core.UCXEndpoint.create(worker.ucx, "127.0.0.1", port, True)
    said = ucxx_core.stream_send(unknown, b"P")
    deadline = time.monotonic() + DEADLINE_S
    while not said.done or len(server._connections) < 2:
        assert time.monotonic() < deadline
        worker.wait(0.01)
    server.close(10.0)
    socket.create_server(("", port)).close()  # the port is free again
    ucxx_core.close(worker, unknown, [said])
    worker.close()


SERVE = """
import sys, msgspec, torch
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2]).parent))
from {module} import TOKEN, UcxxArtifactServer, published, ucxx_core
server = UcxxArtifactServer(Path(sys.argv[1]), TOKEN, ucxx_core)
print(msgspec.json.encode(published(Path(sys.argv[1]), server, 1)).decode(), flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_is_killed_ends_the_transfer_and_not_the_replica(
    tmp_path: Path, server: UcxxArtifactServer
) -> None:
    script = SERVE.format(module=Path(__file__).stem)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "other"), __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        manifest = msgspec.json.decode(process.stdout.readline(), type=Manifest)
        pulling = transport()
        assert digest_of(pulling.fetch(manifest, DEADLINE_S)) == manifest.digest
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with pytest.raises(Transient):
        pulling.fetch(manifest, 5.0)
    successor = published(tmp_path, server, 2)
    assert digest_of(pulling.fetch(successor, DEADLINE_S)) == successor.digest
