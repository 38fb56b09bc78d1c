"""`[pool]`: devices shared by all pipelines."""

from __future__ import annotations

from penstock.records.section import NonNegative, NonNegativeFloat, Section


class PoolSection(Section):
    devices: NonNegative = 0
    """Devices shared by all pipelines: CPU slots, or GPUs where there are any. 0 gives every process its own."""
    payback: NonNegativeFloat = 13.5
    """A worker is woken beyond its pipeline's equal part only for so many times the work that is lost while it wakes.
    Lower makes better use of the devices, higher moves less."""
