"""Base class and field types of the configuration tables."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = PositiveFloat
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


LOOPBACK = "127.0.0.1"
"""Reachable from this machine only."""


class Section(BaseModel):
    """A table of the configuration. Unknown keys are errors; it is immutable after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
