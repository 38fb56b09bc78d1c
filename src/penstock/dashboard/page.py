"""The page: an HTML file with separate scripts and styles, or one file with everything and the data of a run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping

SCRIPTS = ("dom.js", "charts.js", "samples.js", "views.js", "runs.js", "app.js")
STYLE = "dashboard.css"
PLOTLY = "plotly.js"


def key_of(run: str, view: str, query: Mapping[str, str]) -> str:
    """Key of an answer in an exported page; the script computes the same key from the same query."""
    parameters = "&".join(f"{name}={query[name]}" for name in sorted(query))
    return f"{run}/{view}?{parameters}"


def served(template: str) -> str:
    """The page for a browser that requests the other files."""
    scripts = [PLOTLY, *(f"static/{name}" for name in SCRIPTS)]
    return _filled(
        template,
        policy="",  # in the headers
        style=f'<link rel="stylesheet" href="static/{STYLE}">',
        scripts="\n".join(f'<script src="{name}"></script>' for name in scripts),
    )


def exported(template: str, files: Mapping[str, str], plotly: str, data: bytes) -> str:
    """The page with all scripts, styles and `data`, which is JSON."""
    # Within a script element only "</" and "<!--" are special, and JSON can escape "<".
    harmless = data.decode("utf-8").replace("<", "\\u003c")
    scripts = [_in_an_element(script) for script in (plotly, *(files[name] for name in SCRIPTS))]
    elements = [f'<script type="application/json" id="exported">{harmless}</script>']
    elements += [f"<script>{script}</script>" for script in scripts]
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">'
    return _filled(template, policy=policy, style=f"<style>{files[STYLE]}</style>", scripts="\n".join(elements))


def _policy(scripts: Iterable[str]) -> str:
    """Admits these scripts and no other, and no requests."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    admitted = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {admitted}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _in_an_element(script: str) -> str:
    """The text of a script as a browser reads it. It must not end its element."""
    return script.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _filled(template: str, *, policy: str, style: str, scripts: str) -> str:
    head = template.replace("<!-- policy -->", policy)
    return head.replace("<!-- style -->", style).replace("<!-- scripts -->", scripts)
