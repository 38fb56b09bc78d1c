"""What another life of a run begins with: none of the former processes, and perhaps other settings.

Events are replayed by the settings they were decided by: those are events themselves (`SettingsTaken`).
"""

from __future__ import annotations

from penstock.control.ledger import Ledger
from penstock.control.settings import PipelineSettings
from penstock.control.state import PipelineState


def forget_processes(state: PipelineState, ledger: Ledger, now: float) -> int:
    """Nobody is left, nor what they had made and not trained: so many prompts are to be issued again."""
    lost = ledger.lose_payloads()
    ledger.take_released()
    state.members.rings.clear()
    state.members.departed_rings.clear()
    state.weights, state.stop_asked, state.stop_reason, state.failure = None, False, "", ""
    state.digests.clear()
    state.started_at = state.progressed_at = now
    state.issued_before = state.ledger.next_sample
    state.trainer_lost_at, state.trainer_left_well, state.set_aside_in_a_row = None, False, 0
    return lost


def why_not(state: PipelineState, former: PipelineSettings, wanted: PipelineSettings) -> str:
    """Why a run that began by the former settings cannot go on by others; empty if it can."""
    books = state.ledger
    if wanted.group_size != former.group_size and books.next_sample:
        return f"rollout.group_size must stay {former.group_size}, since its samples were made in groups of so many"
    if wanted.filters != former.filters and books.next_sample:
        return f"train.filters must stay {list(former.filters)}, since its groups were judged by those"
    if wanted.steps is not None and wanted.steps < books.version:
        return f"steps must be at least {books.version}, since so many are trained already; found {wanted.steps}"
    return ""
