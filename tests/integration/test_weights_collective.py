"""Broadcast through real process groups: members that never come, hang, or die in the middle of a bucket."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.errors import Aborted, PeerLost
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.weights.io.collective import BroadcastReceiver, BroadcastSender, Group, Invitation
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import Publisher
from penstock.weights.io.store import StoreClient, StoreServer

CONTEXT = multiprocessing.get_context("fork")  # a spawned process could not import this file
DEADLINE_S = 60.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(300, 300 + i, generator=generator) for i in range(8)} | {
        "half": torch.randn(7, generator=generator).to(torch.bfloat16)
    }


def suffering(pipe: Connection, fault: str, timeout_s: float) -> Any:
    """A broadcast whose second bucket does not arrive, for a reason."""
    plain, turn = Group.broadcast, [0]

    def broadcast(group: Group, flat: torch.Tensor, left_s: float) -> None:
        turn[0] += 1
        if turn[0] == 2:
            pipe.send(f"witness {fault}")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(timeout_s + 2.0)
        plain(group, flat, left_s)

    return broadcast


def receive(pipe: Connection) -> None:
    """A receiver process: takes part in the groups it is told of, and suffers what it is told to."""
    torch.set_num_threads(1)
    receiver = BroadcastReceiver(b"secret")
    pipe.send("ready")
    while True:
        invitation, manifest, fault, timeout_s = pipe.recv()
        if fault:
            Group.broadcast = suffering(pipe, fault, timeout_s)  # type: ignore[method-assign]
        try:
            got = receiver.receive(invitation, manifest, build_timeout_s=timeout_s, receive_timeout_s=timeout_s)
            pipe.send(("digest", digest_of(got)))
        except (Aborted, PeerLost) as error:
            pipe.send((type(error).__name__, str(error)))


class Receivers:
    def __init__(self, count: int) -> None:
        pairs = [CONTEXT.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [CONTEXT.Process(target=receive, args=(theirs,), daemon=True) for _, theirs in pairs]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        for pipe in self.pipes:
            assert self.hear(pipe) == "ready"

    def hear(self, pipe: Connection) -> Any:
        assert pipe.poll(DEADLINE_S), "a receiver is silent"
        return pipe.recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


@pytest.fixture
def receivers() -> Any:
    receivers = Receivers(2)
    yield receivers
    receivers.close()


def publish(run_dir: Path, version: int) -> Manifest:
    return Publisher(run_dir, "l1", bucket_bytes=800_000).publish(Version(version), tensors(version))


def invite(
    receivers: Receivers,
    sender: BroadcastSender,
    name: str,
    manifest: Manifest,
    faults: dict[int, str],
    timeout_s: float,
) -> None:
    for number, pipe in enumerate(receivers.pipes):
        pipe.send((sender.invitation(name, number + 1, 3), manifest, faults.get(number, ""), timeout_s))


def test_a_version_reaches_everyone_and_so_does_the_next(tmp_path: Path, receivers: Receivers) -> None:
    sender = BroadcastSender(tmp_path, b"secret")
    for number in (1, 2):
        manifest = publish(tmp_path, number)
        invite(receivers, sender, f"group-{number}", manifest, {}, 30.0)
        sender.send(f"group-{number}", manifest, 2, build_timeout_s=30.0, send_timeout_s=30.0)
        for pipe in receivers.pipes:
            assert receivers.hear(pipe) == ("digest", manifest.digest)


def test_building_has_a_deadline_and_names_the_missing(tmp_path: Path, receivers: Receivers) -> None:
    sender = BroadcastSender(tmp_path, b"secret")
    manifest = publish(tmp_path, 1)
    receivers.pipes[0].send((sender.invitation("first", 1, 3), manifest, "", 1.0))
    with pytest.raises(PeerLost, match=r"ranks \[2\] did not join"):
        sender.send("first", manifest, 2, build_timeout_s=1.0, send_timeout_s=30.0)
    kind, message = receivers.hear(receivers.pipes[0])
    assert kind == "PeerLost"
    assert "[2]" in message
    # The survivor gets it in a group of its own.
    receivers.pipes[0].send((sender.invitation("second", 1, 2), manifest, "", 30.0))
    sender.send("second", manifest, 1, build_timeout_s=30.0, send_timeout_s=30.0)
    assert receivers.hear(receivers.pipes[0]) == ("digest", manifest.digest)


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_receiver_lost_in_the_middle_breaks_the_group_for_all_and_the_next_group_works(
    tmp_path: Path, receivers: Receivers, fault: str
) -> None:
    sender = BroadcastSender(tmp_path, b"secret")
    manifest = publish(tmp_path, 1)
    assert len(manifest.buckets) > 2
    invite(receivers, sender, "first", manifest, {1: fault}, 2.0)
    with pytest.raises(Aborted, match="first"):
        sender.send("first", manifest, 2, build_timeout_s=30.0, send_timeout_s=2.0)
    assert receivers.hear(receivers.pipes[1]) == f"witness {fault}"
    assert receivers.hear(receivers.pipes[0])[0] in ("Aborted", "digest")  # it may have had everything already
    receivers.pipes[0].send((sender.invitation("second", 1, 2), manifest, "", 30.0))
    sender.send("second", manifest, 1, build_timeout_s=30.0, send_timeout_s=30.0)
    assert receivers.hear(receivers.pipes[0]) == ("digest", manifest.digest)


def test_a_sender_that_never_comes_is_noticed(tmp_path: Path, receivers: Receivers) -> None:
    sender = BroadcastSender(tmp_path, b"secret")
    manifest = publish(tmp_path, 1)
    invite(receivers, sender, "first", manifest, {}, 0.5)
    for pipe in receivers.pipes:
        kind, message = receivers.hear(pipe)
        assert kind == "PeerLost"
        assert "[0]" in message


def test_no_store_is_an_aborted_group(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 1)
    with pytest.raises(Aborted, match="nowhere"):
        BroadcastReceiver(b"secret").receive(
            Invitation("nowhere", "127.0.0.1", 1, 1, 2), manifest, build_timeout_s=0.5, receive_timeout_s=0.5
        )


def test_a_group_listens_where_its_store_does() -> None:
    """By itself the library listens at the address of the host name, which others may reach."""
    server = StoreServer(b"secret", host="127.0.0.2", timeout_s=5.0)
    before = listening()
    group = Group(Invitation("alone", server.host, server.port, 0, 1), 5.0, server)
    try:
        assert {host for host, _ in listening() - before} == {"127.0.0.2"}
        friend = StoreClient("127.0.0.2", server.port, b"secret", 5.0)
        assert friend.local_host.startswith("127.")
        friend.close()
    finally:
        group.close()
        server.close(5.0)


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_store_hears_only_those_who_know_the_token() -> None:
    server = StoreServer(b"secret", timeout_s=1.0)
    server.set("key", "value")
    friend = StoreClient("127.0.0.1", server.port, b"secret", 5.0)
    assert (friend.get("key"), friend.check(["key", "none"])) == (b"value", False)
    assert friend.add("count", 2) == server.add("count", 0) == 2
    assert friend.compare_set("key", "other", "new") == b"value"
    assert friend.compare_set("answer", "", "new") == b"new"
    assert friend.delete_key("answer")
    friend.set("large", b"x" * 100_000)
    assert len(server.get("large")) == 100_000
    with pytest.raises(TimeoutError, match="were not set"):
        server.wait(["none"], timedelta(seconds=0.02))
    with pytest.raises(OSError):
        StoreClient("127.0.0.1", server.port, b"guessed", 5.0)
    server.close(5.0)
    with pytest.raises(OSError):
        friend.add("count", 1)
