"""The configuration repeats a monitor's settings so that it need not import it; here the two are held together."""

from __future__ import annotations

import inspect

from penstock.runtime.lag import LagMonitor
from penstock.runtime.settings import LagSection


def test_the_lag_section_is_what_a_monitor_takes():
    taken = {p.name: p.default for p in inspect.signature(LagMonitor).parameters.values() if p.kind is p.KEYWORD_ONLY}
    del taken["on_stall"]
    assert {name: field.default for name, field in LagSection.model_fields.items()} == taken
