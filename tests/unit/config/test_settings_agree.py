"""The configuration repeats the stages' settings so that it need not import torch; here the two are held together."""

from __future__ import annotations

import msgspec
import pytest

from penstock.config.run import ControlLossSection, OptimizerSection, Section, TokenLossSection
from penstock.train.loss import ControlLossSettings, TokenLossSettings
from penstock.train.step import OptimSettings


@pytest.mark.parametrize(
    ("section", "settings", "elsewhere"),
    [
        (TokenLossSection, TokenLossSettings, {"temperature"}),
        (ControlLossSection, ControlLossSettings, set()),
        (OptimizerSection, OptimSettings, {"seed"}),
    ],
)
def test_fields_and_defaults_agree(section: type[Section], settings: type[msgspec.Struct], elsewhere: set[str]):
    """`elsewhere` are settings that other parts of the configuration decide."""
    wanted = {field.name: field.default for field in msgspec.structs.fields(settings) if field.name not in elsewhere}
    assert {name: field.default for name, field in section.model_fields.items()} == wanted
