"""`[journal]`: what the controller writes down."""

from __future__ import annotations

from penstock.records.section import Positive, Section


class JournalSection(Section):
    snapshot_every_events: Positive = 20_000
    """About the largest number of events that a restarted controller replays."""
