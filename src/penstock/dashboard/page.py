"""The page: an HTML file with separate scripts and styles, or one file with everything and the data of a run."""

from __future__ import annotations

from collections.abc import Mapping

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
        style=f'<link rel="stylesheet" href="static/{STYLE}">',
        scripts="\n".join(f'<script src="{name}"></script>' for name in scripts),
    )


def exported(template: str, files: Mapping[str, str], plotly: str, data: bytes) -> str:
    """The page with all scripts, styles and `data`, which is JSON."""
    # Within a script element only "</" and "<!--" are special, and JSON can escape "<".
    harmless = data.decode("utf-8").replace("<", "\\u003c")
    scripts = [plotly, *(files[name] for name in SCRIPTS)]
    elements = [f'<script type="application/json" id="exported">{harmless}</script>']
    elements += [f"<script>{_in_an_element(script)}</script>" for script in scripts]
    return _filled(template, style=f"<style>{files[STYLE]}</style>", scripts="\n".join(elements))


def _in_an_element(script: str) -> str:
    """The text of a script must not end its element."""
    return script.replace("</script", "<\\/script")


def _filled(template: str, *, style: str, scripts: str) -> str:
    return template.replace("<!-- style -->", style).replace("<!-- scripts -->", scripts)
