"""HTML from texts of a run: whatever is not markup already is escaped."""

from __future__ import annotations

import html

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy of a page without scripts: nothing is executed and nothing fetched."""


class Markup(str):
    """Text that is HTML already. Made of templates and numbers in the code, never of a text of the run."""


def filled(template: str, *values: object) -> Markup:
    """The template with its `{}` replaced by the values: markup as it is, everything else escaped."""
    return Markup(template.format(*map(_escaped, values)))


def joined(parts: list[Markup], between: str = "") -> Markup:
    return Markup(between.join(map(_escaped, parts)))


def _escaped(value: object) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))
