"""`[journal]`: what the controller writes down."""

from __future__ import annotations

from penstock.records.section import Positive, Section


class JournalSection(Section):
    snapshot_every_events: Positive = 20_000
    """A restarted controller replays no more than about so many events."""
