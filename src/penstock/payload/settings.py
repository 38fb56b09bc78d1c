"""`[payload]`: how samples reach the trainer."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import LOOPBACK, Positive, Section


class PayloadSection(Section):
    transport: Literal["auto", "shm", "tcp", "ucxx"] = "auto"
    """How samples reach the trainer: `auto` maps shared memory on the same host and uses TCP otherwise."""
    host: str = LOOPBACK
    """Address to serve payloads on. Anything but loopback exposes them to the network; the token still guards them."""
    ports: Positive = 2
    """TCP and UCXX: ports of one worker; if one breaks, another is asked."""
