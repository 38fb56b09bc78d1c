"""Checks of pipelines and requests: one that could never be served is refused at once."""

from __future__ import annotations

from penstock.errors import ConfigError, LocalProtocolError
from penstock.pool.events import DevicesRequested, PipelineOpened
from penstock.pool.places import places
from penstock.records.pool import DeviceId, Priority, Topology


def check_shape(event: PipelineOpened, topology: Topology) -> None:
    """Raises `ConfigError` unless at least one worker of the pipeline fits somewhere."""
    count = topology.device_count
    unknown = [device for device in event.inference if not 0 <= device < count]
    if unknown or len(set(event.inference)) != len(event.inference):
        raise ConfigError(
            f"pipeline {event.pipeline!r}: inference devices must be distinct and within 0 to {count - 1}, "
            f"found {list(event.inference)}"
        )
    if event.bundle < 1 or event.concurrency < 1 or event.weight <= 0:
        raise ConfigError(
            f"pipeline {event.pipeline!r}: bundle and concurrency must be at least 1, weight positive, "
            f"found {event.bundle}, {event.concurrency}, {event.weight}"
        )
    if not len(places(topology, event.inference, event.bundle)):
        raise ConfigError(
            f"pipeline {event.pipeline!r}: no {event.bundle} neighbouring devices of one node among its inference "
            f"devices {list(event.inference)}; a worker needs such a bundle"
        )


def check_request(event: DevicesRequested, topology: Topology) -> tuple[DeviceId, ...]:
    """The requested devices, sorted. Raises `LocalProtocolError` if the request could never be granted."""
    if event.priority == Priority.GENERATION:
        raise LocalProtocolError("generation does not request devices: declare demand, and the pool wakes workers")
    count = topology.device_count
    if not set(event.among) <= set(range(count)) or not 1 <= event.count <= len(set(event.among)):
        raise LocalProtocolError(
            f"{event.member} requests {event.count} of devices {list(event.among)}; the pool has 0 to {count - 1}"
        )
    among = tuple(sorted(set(event.among)))
    if event.count < len(among) and not len(places(topology, among, event.count)):
        raise LocalProtocolError(f"no {event.count} neighbouring devices of one node among {list(among)}")
    return among
