"""`[payload]`: how samples reach the trainer."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import LOOPBACK, Positive, Section


class PayloadSection(Section):
    transport: Literal["auto", "shm", "tcp", "ucxx"] = "auto"
    """How samples reach the trainer: `auto` maps shared memory on the same host and uses TCP otherwise."""
    host: str = LOOPBACK
    """Address to serve payloads on. Not loopback: exposed to the network; clients still need the run's token."""
    ports: Positive = 2
    """TCP and UCXX: number of ports per worker. If one fails, clients use another."""
