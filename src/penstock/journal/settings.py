"""`[journal]`: the journal of the controller."""

from __future__ import annotations

from penstock.records.section import Positive, Section


class JournalSection(Section):
    snapshot_every_events: Positive = 20_000
    """Events between two snapshots: about the most that a restarted controller replays."""
