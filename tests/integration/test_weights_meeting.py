"""Meeting for a broadcast: who asks is invited, who does not come is left behind, and everyone gets the version."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.weights.io import meeting as module
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.io.meeting import BroadcastHost, BroadcastTransport

DEADLINE_S = 120.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(100, 100 + i, generator=generator) for i in range(5)}


class Stage:
    """A trainer that broadcasts to two replicas."""

    def __init__(self, run_dir: Path, build_timeout_s: float) -> None:
        self.host = BroadcastHost(run_dir, b"secret", expected=2, build_timeout_s=build_timeout_s, send_timeout_s=60.0)
        self.publisher = Publisher(run_dir, "l1", keep=8, bucket_bytes=50_000, meeting=self.host.address)
        self.transports = [
            BroadcastTransport(name, FileTransport(run_dir), b"secret", invite_timeout_s=20.0) for name in ("a", "b")
        ]

    def publish(self, version: int) -> Manifest:
        manifest = self.publisher.publish(Version(version), tensors(version))
        self.host.offer(manifest)
        return manifest

    def host_looked_again(self) -> None:
        """Waits until the host has looked for those who ask, a few times: the first look may have begun before."""
        looked, plain = threading.Semaphore(0), self.host._waiting

        def look(digest: str) -> list[int]:
            looked.release()
            return plain(digest)

        self.host._waiting = look  # type: ignore[method-assign]
        assert all(looked.acquire(timeout=DEADLINE_S) for _ in range(4))
        self.host._waiting = plain

    def fetch(self, *transports: BroadcastTransport, manifest: Manifest) -> list[str]:
        """Digests of what each of them got, all at the same time."""
        with ThreadPoolExecutor(len(transports)) as pool:
            found = [pool.submit(transport.fetch, manifest, DEADLINE_S) for transport in transports]
            return [digest_of(one.result()) for one in found]


@pytest.fixture
def stage_for(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(build_timeout_s: float = 60.0) -> Stage:
        stages.append(Stage(tmp_path, build_timeout_s))
        return stages[-1]

    yield make
    for stage in stages:
        stage.host.close(10.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "weights-broadcast"]


def test_all_who_ask_get_each_version_in_one_group(stage_for: Callable[..., Stage]) -> None:
    stage = stage_for()
    for version in range(1, 9):
        manifest = stage.publish(version)
        assert stage.fetch(*stage.transports, manifest=manifest) == [manifest.digest] * 2
        stage.host_looked_again()
    assert [(transport.received, transport.fallbacks) for transport in stage.transports] == [(8, 0)] * 2
    assert (stage.host.sent, stage.host.broken) == (8, 0)


@pytest.mark.slow
def test_one_that_gave_up_waiting_is_not_waited_for_later(
    stage_for: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_for(build_timeout_s=5.0)
    impatient, other = stage.transports

    def stay_away(*_: Any, **__: Any) -> Mapping[str, torch.Tensor]:
        raise module.Aborted("stays away")

    plain = other._receiver.receive
    monkeypatch.setattr(other._receiver, "receive", stay_away)
    first = stage.publish(1)
    assert stage.fetch(other, manifest=first) == [first.digest]  # and leaves the host waiting in its group
    second = stage.publish(2)
    impatient._invite_timeout_s = 0.2
    assert stage.fetch(impatient, manifest=second) == [second.digest]
    assert stage.host.broken == 0, "the host was not busy any more: no replica had to give up"
    stage.host_looked_again()
    monkeypatch.setattr(other._receiver, "receive", plain)
    impatient._invite_timeout_s = 20.0
    third = stage.publish(3)
    assert stage.fetch(*stage.transports, manifest=third) == [third.digest] * 2
    stage.host_looked_again()
    assert [(transport.received, transport.fallbacks) for transport in stage.transports] == [(1, 1), (1, 1)]
    assert (stage.host.sent, stage.host.broken) == (1, 1)


def test_a_version_that_is_published_afresh_is_still_broadcast(stage_for: Callable[..., Stage]) -> None:
    stage = stage_for()
    stage.publish(1)
    manifest = stage.publish(1)
    assert stage.fetch(*stage.transports, manifest=manifest) == [manifest.digest] * 2
    assert [(transport.received, transport.fallbacks) for transport in stage.transports] == [(1, 0)] * 2


def test_a_replica_that_asks_alone_does_not_wait_for_others(stage_for: Callable[..., Stage]) -> None:
    stage = stage_for()
    manifest = stage.publish(1)
    assert stage.fetch(stage.transports[0], manifest=manifest) == [manifest.digest]
    assert stage.fetch(stage.transports[1], manifest=manifest) == [manifest.digest]
    assert [transport.received for transport in stage.transports] == [1, 1]


def test_one_that_asks_and_does_not_come_costs_this_broadcast_only(
    stage_for: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_for(build_timeout_s=1.0)
    absent, present = stage.transports
    came: list[Any] = []

    def stay_away(*arguments: Any, **_: Any) -> Mapping[str, torch.Tensor]:
        came.append(arguments)
        raise module.Aborted("stays away")

    plain = absent._receiver.receive
    monkeypatch.setattr(absent._receiver, "receive", stay_away)
    first = stage.publish(1)
    present._invite_timeout_s = 1.0  # which bounds the building of its group too
    assert stage.fetch(absent, present, manifest=first) == [first.digest] * 2
    assert came, "the fault did not strike"
    assert [(transport.received, transport.fallbacks) for transport in stage.transports] == [(0, 1), (0, 1)]
    monkeypatch.setattr(absent._receiver, "receive", plain)
    present._invite_timeout_s = 20.0
    second = stage.publish(2)
    assert stage.fetch(absent, present, manifest=second) == [second.digest] * 2
    assert [(transport.received, transport.fallbacks) for transport in stage.transports] == [(1, 1), (1, 1)]
    assert stage.host.broken == 1


def test_an_overtaken_version_comes_another_way_at_once(
    stage_for: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = stage_for()
    first, second, third = (stage.publish(version) for version in (1, 2, 3))
    for number, overtaken in enumerate((first, second), 1):
        with caplog.at_level(logging.DEBUG):
            assert stage.fetch(stage.transports[0], manifest=overtaken) == [overtaken.digest]
        assert stage.transports[0].fallbacks == number
        assert caplog.text.count("broadcasts a newer version") == number
    assert stage.fetch(stage.transports[0], manifest=third) == [third.digest]
    assert stage.transports[0].received == 1


def test_a_trainer_that_is_gone_is_noticed_at_once(tmp_path: Path) -> None:
    manifest = Publisher(tmp_path, "l1", meeting="127.0.0.1:1").publish(Version(1), tensors(1))
    transport = BroadcastTransport("a", FileTransport(tmp_path), b"secret")
    assert digest_of(transport.fetch(manifest, DEADLINE_S)) == manifest.digest
    assert (transport.received, transport.fallbacks) == (0, 1)


def test_versions_without_a_meeting_come_another_way(tmp_path: Path) -> None:
    manifest = Publisher(tmp_path, "l1").publish(Version(1), tensors(1))
    transport = BroadcastTransport("a", FileTransport(tmp_path), b"secret")
    assert digest_of(transport.fetch(manifest, DEADLINE_S)) == manifest.digest
    assert transport.fallbacks == 1
