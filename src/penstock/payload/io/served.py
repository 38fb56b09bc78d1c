"""Serves a worker's payloads: mapped on the same host, over TCP or UCXX to other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock.errors import ConfigError
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import TcpServer
from penstock.payload.settings import PayloadSection
from penstock.records.payload import RingAddress
from penstock.runtime.process import host_id

CLOSE_S = 2.0


@contextmanager
def served(ring: Ring, section: PayloadSection, token: str) -> Iterator[RingAddress]:
    """Serves the ring while the body runs; the address contains the bound ports."""
    with ExitStack() as servers:
        tcp_ports: tuple[int, ...] = ()
        ucxx_ports: tuple[int, ...] = ()
        if section.transport in ("auto", "tcp"):
            tcp = TcpServer(ring.name, token, host=section.host, ports=(0,) * section.ports)
            servers.callback(tcp.close, CLOSE_S)
            tcp_ports = tcp.ports
        if section.transport == "ucxx":
            try:
                from penstock.payload.io.ucxx import UcxxServer
            except ImportError as error:
                raise ConfigError(
                    f"payload.transport is 'ucxx', which needs the extra penstock-rl[ucxx]: {error}"
                ) from error
            ucxx = UcxxServer(ring.name, token, host=section.host, ports=(0,) * section.ports)
            servers.callback(ucxx.close, CLOSE_S)
            ucxx_ports = ucxx.ports
        yield ring.address(host_id=host_id(), host=section.host, tcp_ports=tcp_ports, ucxx_ports=ucxx_ports)
