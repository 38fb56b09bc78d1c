"""The configuration repeats the stages' settings so that it need not import torch; here the two are held together."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from penstock.config.run import Section
from penstock.runtime.lag import LagMonitor
from penstock.runtime.settings import LagSection
from penstock.train.loss import PpoLossSettings, TokenLossSettings
from penstock.train.settings import OptimizerSection, PpoLossSection, TokenLossSection
from penstock.train.step import OptimSettings


@pytest.mark.parametrize(
    ("section", "settings", "elsewhere"),
    [
        (TokenLossSection, TokenLossSettings, {"temperature"}),
        (PpoLossSection, PpoLossSettings, set()),
        (OptimizerSection, OptimSettings, {"seed"}),
    ],
)
def test_fields_and_defaults_agree(section: type[Section], settings: type[msgspec.Struct], elsewhere: set[str]):
    """`elsewhere` are settings that other parts of the configuration decide."""
    wanted = {field.name: field.default for field in msgspec.structs.fields(settings) if field.name not in elsewhere}
    assert {name: field.default for name, field in section.model_fields.items()} == wanted


def test_the_lag_section_is_what_a_monitor_takes():
    taken = {p.name: p.default for p in inspect.signature(LagMonitor).parameters.values() if p.kind is p.KEYWORD_ONLY}
    del taken["on_stall"]
    assert {name: field.default for name, field in LagSection.model_fields.items()} == taken
