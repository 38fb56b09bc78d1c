"""Base class and field types of the configuration tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = PositiveFloat
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


Trained = Literal["language", "gymnasium"]
"""What a pipeline trains: a language model, or the policy of a gymnasium environment."""


class UsedBy(NamedTuple):
    """Marks a key, or a whole table, that pipelines of the other kind do not use."""

    trained: Trained


LANGUAGE_ONLY = UsedBy("language")
GYMNASIUM_ONLY = UsedBy("gymnasium")

LOOPBACK = "127.0.0.1"
"""Reachable from this machine only."""


class Section(BaseModel):
    """A table of the configuration. Unknown keys are errors; it is immutable after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def used_by(field: FieldInfo) -> Trained | None:
    """The only kind of pipeline that uses this key or table; None: both do."""
    return next((mark.trained for mark in field.metadata if isinstance(mark, UsedBy)), None)


def written_for_others(section: Section, trained: Trained) -> Iterator[str]:
    """Dotted names of the keys that the user wrote and that a pipeline which trains this does not use."""
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value, foreign = getattr(section, name), used_by(field) not in (None, trained)
        if isinstance(value, Section):
            inner = value.model_fields_set if foreign else written_for_others(value, trained)
            yield from (f"{name}.{key}" for key in inner)
        elif foreign:
            yield name
