"""Publishes a trainer's versions: always in the run directory, and by the weight transports that are configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from penstock.payload.settings import PayloadSection
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.runtime.member import RunMember
from penstock.runtime.process import host_id
from penstock.weights.io.device import DeviceExport
from penstock.weights.io.files import Publisher
from penstock.weights.io.meeting import BroadcastHost
from penstock.weights.io.pull import ArtifactServer
from penstock.weights.io.pull_ucxx import UcxxArtifactServer
from penstock.weights.io.transports import ucx_for
from penstock.weights.settings import WeightsSection

CLOSE_S = 2.0


class Server(Protocol):
    """Serves versions to workers that do not read the files."""

    def offer(self, manifest: Manifest) -> None: ...


class WeightPublisher:
    """Publishes versions; each is available by all transports before `publish` returns. For one thread at a time."""

    def __init__(self, publisher: Publisher, servers: list[Server], device: DeviceExport | None) -> None:
        self._publisher = publisher
        self._servers = servers
        self._device = device

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, Tensor],
        *,
        durable: bool = False,
        others: Callable[[Path], None] = lambda directory: None,
    ) -> Manifest:
        """See `Publisher.publish`."""
        manifest = self._publisher.publish(version, tensors, durable=durable, others=others)
        for server in self._servers:
            server.offer(manifest)
        if self._device is not None:
            self._device.offer(manifest, tensors)
        return manifest

    def make_durable(self, version: Version) -> None:
        """See `Publisher.make_durable`."""
        self._publisher.make_durable(version)


@contextmanager
def weight_publisher(
    process: RunMember, lineage: str, weights: WeightsSection, payload: PayloadSection, *, workers: int, on_device: bool
) -> Iterator[WeightPublisher]:
    """Serves published versions while the body runs."""
    host = payload.host
    places: dict[str, object] = {}
    servers: list[Server] = []
    with ExitStack() as open_servers:
        if weights.transport != "files":
            pulled = ArtifactServer(process.run.root, process.run.token().encode(), host=host, keep=weights.keep)
            open_servers.callback(pulled.close, CLOSE_S)
            servers.append(pulled)
            places |= {"host_id": host_id(), "addresses": (pulled.address,)}
        ucx = ucx_for(payload.transport)
        if weights.transport != "files" and ucx is not None:
            by_ucxx = UcxxArtifactServer(
                process.run.root, process.run.token().encode(), ucx, host=host, keep=weights.keep
            )
            open_servers.callback(by_ucxx.close, CLOSE_S)
            servers.append(by_ucxx)
            places["ucxx_addresses"] = (by_ucxx.address,)
        if weights.transport == "broadcast":
            token = process.run.token().encode()
            meeting = BroadcastHost(
                process.run.root, token, host=host, expected=workers, send_timeout_s=weights.deadline_s
            )
            open_servers.callback(meeting.close, CLOSE_S)
            servers.append(meeting)
            places["meeting"] = meeting.address
        publisher = Publisher(process.run.root, lineage, weights.keep, pipeline=process.pipeline_name, **places)  # type: ignore[arg-type]
        yield WeightPublisher(publisher, servers, DeviceExport(process.run.root) if on_device else None)
