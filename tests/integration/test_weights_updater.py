"""The worker's update task with real engines and real artifacts; the loop runs, nothing sleeps for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from penstock.engines.serving import Serving
from penstock.errors import PeerLost, Stale, Transient
from penstock.records.ids import Version
from penstock.records.weights import Held, Manifest
from penstock.runtime.tensors import module_tensors
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater, Way
from penstock.weights.replica import MAX_INTERRUPTIONS, ReplicaState

WAYS: list[Way] = ["staged", "in_place"]


def policy(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Newest:
    """A source that always knows the newest manifest, and waits like a long-poll."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.changed = asyncio.Event()
        self.errors: list[Exception] = []

    def publish(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.changed.set()

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        if self.errors:
            raise self.errors.pop(0)
        if self.manifest is None or self.manifest.held == held:
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), wait_s)
            except TimeoutError:
                return None
        return self.manifest


class Bench:
    """An engine, its updater, and what it reported."""

    def __init__(self, run_dir: Path, way: Way, **options: Any) -> None:
        self.publisher = Publisher(run_dir, "l1", keep=2, bucket_bytes=64)
        self.source = Newest()
        self.reports: list[ReplicaReport] = []
        self.engine = options.pop("engine", None) or Serving(policy(100))
        transport = options.pop("transport", None) or FileTransport(run_dir)
        self.told = asyncio.Event()

        async def report(message: ReplicaReport) -> None:
            self.reports.append(message)
            self.told.set()

        self.updater = ReplicaUpdater(
            self.engine,
            self.source,
            report,
            transport,
            way=way,
            poll_s=0.05,
            change_timeout_s=2.0,
            retry_first_s=0.001,
            retry_cap_s=0.01,
            **options,
        )

    def publish(self, version: int) -> Manifest:
        manifest = self.publisher.publish(Version(version), module_tensors(policy(version)))
        self.source.publish(manifest)
        return manifest

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.told.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.told.wait(), 0.02)

    async def serving(self, version: int) -> None:
        await self.until(lambda: bool(self.reports) and self.reports[-1].version == version)
        assert self.reports[-1].state is ReplicaState.SERVING

    def assert_serves(self, version: int) -> None:
        with self.engine.step() as (served, digest):
            assert served == version
            assert digest == digest_of(self.engine.served_tensors()) == digest_of(module_tensors(policy(version)))


async def drive(bench: Bench, story: Awaitable[None]) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.updater.run())
        await story
        task.cancel()
    bench.updater.replica.check()


@pytest.mark.parametrize("way", WAYS)
async def test_a_new_engine_serves_nothing_before_the_first_version(tmp_path: Path, way: Way) -> None:
    bench = Bench(tmp_path, way)

    async def story() -> None:
        await bench.until(lambda: bool(bench.reports))
        assert bench.reports[0].state is ReplicaState.STALE
        assert bench.engine.state == "asleep"
        bench.publish(0)
        await bench.serving(0)
        bench.assert_serves(0)

    await drive(bench, story())


@pytest.mark.parametrize("way", WAYS)
async def test_a_version_with_the_bytes_that_are_served_is_taken_up_at_no_cost(tmp_path: Path, way: Way) -> None:
    """As after a step without a gradient. Nothing is fetched, and a step in flight does not hold it up."""
    bench = Bench(tmp_path, way)

    async def story() -> None:
        bench.publish(0)
        await bench.serving(0)
        same = module_tensors(policy(0))
        with bench.engine.step() as (began_with, digest):
            bench.source.publish(msgspec.structs.replace(bench.publisher.publish(Version(1), same), directory="gone"))
            await bench.serving(1)
            assert began_with == 0
        with bench.engine.step() as served:
            assert served == (1, digest)
        assert bench.reports[-1].pause_s == 0.0
        assert bench.updater.statistics.failures == bench.updater.statistics.interrupted == 0
        bench.publish(2)
        await bench.serving(2)
        bench.assert_serves(2)

    await drive(bench, story())


@pytest.mark.parametrize("way", WAYS)
async def test_an_engine_that_holds_the_version_already_is_left_alone(tmp_path: Path, way: Way) -> None:
    digest = digest_of(module_tensors(policy(0)))
    bench = Bench(tmp_path, way, engine=Serving(policy(0), version=0, digest=digest))
    bench.publish(0)

    async def story() -> None:
        await bench.serving(0)
        bench.assert_serves(0)

    await drive(bench, story())
    assert bench.updater.statistics.updates == 0


async def test_an_engine_that_claims_a_digest_it_does_not_hold_is_not_believed(tmp_path: Path) -> None:
    digest = digest_of(module_tensors(policy(0)))
    bench = Bench(tmp_path, "staged", engine=Serving(policy(7), version=0, digest=digest))
    bench.publish(0)

    async def story() -> None:
        await bench.serving(0)
        bench.assert_serves(0)

    await drive(bench, story())
    assert bench.reports[0].state is ReplicaState.STALE


@pytest.mark.parametrize("way", WAYS)
async def test_the_newest_version_wins_and_the_others_are_skipped(tmp_path: Path, way: Way) -> None:
    bench = Bench(tmp_path, way)

    async def story() -> None:
        bench.publish(0)
        await bench.serving(0)
        for version in range(1, 8):  # the updater gets no turn between these
            bench.publish(version)
        await bench.serving(7)
        bench.assert_serves(7)

    await drive(bench, story())
    assert [r.version for r in bench.reports if r.state is ReplicaState.SERVING] == [0, 7]
    assert bench.reports[-1].skipped_versions == 6
    assert bench.updater.statistics.skipped_versions == 6
    assert bench.updater.statistics.behind == 0


@pytest.mark.parametrize("way", WAYS)
async def test_a_lost_controller_does_not_stop_serving(tmp_path: Path, way: Way) -> None:
    bench = Bench(tmp_path, way)

    async def story() -> None:
        bench.publish(0)
        await bench.serving(0)
        bench.source.errors = [Transient("gone"), Transient("still gone")]
        bench.publish(1)
        await bench.until(lambda: not bench.source.errors)
        bench.assert_serves(bench.engine.version)
        await bench.serving(1)

    await drive(bench, story())


class Failing:
    """A transport that fails as told before it brings anything."""

    def __init__(self, inner: FileTransport, errors: list[Exception]) -> None:
        self.inner, self.errors, self.fired = inner, errors, 0

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        if manifest.version > 0 and self.errors:
            self.fired += 1
            raise self.errors.pop(0)
        return self.inner.fetch(manifest, timeout_s, verify=verify)


async def two_versions(bench: Bench) -> None:
    bench.publish(0)
    await bench.serving(0)
    bench.publish(1)
    await bench.serving(1)


@pytest.mark.parametrize("way", WAYS)
async def test_a_version_removed_before_it_was_read_is_no_failure(tmp_path: Path, way: Way) -> None:
    transport = Failing(FileTransport(tmp_path), [Stale("removed"), Stale("removed")])
    bench = Bench(tmp_path, way, transport=transport)
    await drive(bench, two_versions(bench))
    assert transport.fired == bench.updater.statistics.overtaken == 2
    assert bench.updater.statistics.failures == 0


async def test_a_newest_version_with_a_missing_file_is_reported_so_that_it_is_published_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "staged")

    async def story() -> None:
        bench.publish(0)
        await bench.serving(0)
        newest = bench.publisher.publish(Version(1), module_tensors(policy(1)))
        (tmp_path / newest.directory / newest.buckets[0].file).unlink()
        bench.source.publish(newest)
        await bench.until(lambda: bench.reports[-1].damaged == newest.held)
        assert bench.reports[-1].state is ReplicaState.SERVING
        bench.assert_serves(0)
        assert bench.publish(1) == newest
        await bench.serving(1)
        bench.assert_serves(1)

    await drive(bench, story())
    assert bench.updater.statistics.overtaken >= MAX_INTERRUPTIONS


async def test_a_file_server_that_gives_up_costs_this_update_and_not_the_process(tmp_path: Path) -> None:
    transport = Failing(FileTransport(tmp_path), [TimeoutError("the file server does not answer")])
    bench = Bench(tmp_path, "staged", transport=transport)
    await drive(bench, two_versions(bench))
    assert transport.fired == bench.updater.statistics.failures == 1


async def test_weights_of_another_model_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "in_place")

    async def story() -> None:
        bench.publish(0)
        await bench.serving(0)
        bench.source.publish(bench.publisher.publish(Version(1), {"other": torch.zeros(3)}))
        await bench.until(lambda: bool(bench.reports[-1].error))
        assert "does not fit" in bench.reports[-1].error
        assert bench.reports[-1].state is ReplicaState.SERVING
        bench.assert_serves(0)
        bench.publish(2)
        await bench.serving(2)
        assert bench.reports[-1].error == ""

    await drive(bench, story())


async def test_a_step_that_never_ends_gives_the_replica_up(tmp_path: Path) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Hanging(FileTransport):
        def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> dict[str, torch.Tensor]:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)
            return super().fetch(manifest, timeout_s, verify=verify)

    bench = Bench(tmp_path, "staged", transport=Hanging(tmp_path), fetch_timeout_s=0.02, grace_s=0.02)
    bench.publish(0)
    with pytest.raises(PeerLost, match=r"'fetch'.*replaced"):
        async with asyncio.timeout(20):
            await bench.updater.run()
    release.set()
    assert bench.reports[-1].state is ReplicaState.STALE
