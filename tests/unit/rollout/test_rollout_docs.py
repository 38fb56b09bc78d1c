"""The page about generation says what the code does. `python tests/unit/rollout/test_rollout_docs.py` rewrites it."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.rollout import hooks, trace
from penstock.rollout.flow import TRANSITIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocols" / "hooks.md"


def tables() -> dict[str, str]:
    assert hooks.__doc__ is not None
    assert trace.__doc__ is not None
    contracts = re.search(r"(?ms)^\| hook.*?in flight\.$", hooks.__doc__)
    assert contracts is not None
    stages = ["| from | by | to |", "|---|---|---|"]
    stages += [f"| {stage} | {by} | {to} |" for stage, row in TRANSITIONS.items() for by, to in row.items()]
    traces = re.search(r"(?ms)^    A .*?controller$", trace.__doc__)
    assert traces is not None
    return {"hooks": contracts.group(), "stages": "\n".join(stages), "traces": traces.group()}


def test_the_page_agrees_with_the_code() -> None:
    page = PAGE.read_text()
    for name, table in tables().items():
        assert f"<!-- {name} -->\n\n{table}\n" in page, f"run {Path(__file__).name} to bring {name!r} up to date"


if __name__ == "__main__":
    text = PAGE.read_text()
    for section, content in tables().items():
        opening, closing = f"<!-- {section} -->", f"<!-- end of {section} -->"
        head, _, rest = text.partition(opening)
        text = f"{head}{opening}\n\n{content}\n\n{closing}{rest.partition(closing)[2]}"
    PAGE.write_text(text)
