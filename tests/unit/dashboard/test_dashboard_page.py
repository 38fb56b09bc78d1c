"""The page in one file: nothing in the data can break out of it, and every file it needs is there."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import orjson

from penstock.dashboard.io.files import own_files, plotly_script
from penstock.dashboard.page import SCRIPTS, exported, key_of, served

HOSTILE = "</script><script>alert(1)</script><!-- & \u2028"


def test_the_served_page_names_only_its_own_files():
    files = own_files()
    text = served(files["index.html"])
    assert re.findall(r'src="([^"]+)"', text) == ["plotly.js", *(f"static/{name}" for name in SCRIPTS)]
    assert not re.search(r"https?://", "".join(files.values()))
    assert plotly_script().is_file()


def test_no_script_makes_markup_of_data():
    for name in SCRIPTS:
        code = re.sub(r"/\*.*?\*/", "", own_files()[name], flags=re.DOTALL)
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in code, f"{name} uses {way}"


def test_data_stays_within_its_element_and_comes_back_whole():
    text = exported(own_files()["index.html"], own_files(), "plotly();", orjson.dumps({"text": HOSTILE}))
    assert "<script>alert(1)" not in text
    data = re.search(r'<script type="application/json" id="exported">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == {"text": HOSTILE}
    assert "plotly();" in text


def test_a_script_cannot_end_its_own_element():
    text = exported(own_files()["index.html"], own_files(), 'x = "</script>"', b"{}")
    assert 'x = "<\\/script>"' in text


def test_the_exported_page_admits_its_own_scripts_and_no_other():
    text = exported(own_files()["index.html"], own_files(), 'plotly = "</script>";\r\n', b"{}")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', text)
    assert policy is not None
    assert policy.start() < text.index("<script")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1 + len(SCRIPTS)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    admitted = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy[1].startswith(f"default-src 'none'; script-src {admitted}; ")
    assert "\r" not in text, "a browser reads another text than was counted"
    assert "connect-src" not in policy[1]


def test_charts_are_given_escaped_texts_only():
    """Plotly draws links and styles of texts, which can be names of a run."""
    code = "".join(own_files()[name] for name in SCRIPTS)
    drawn = re.findall(r"Plotly\.(?!purge|Plots)\w+\(.*\)", code)
    assert drawn == ["Plotly.react(node, drawn.filled, drawn.layout, { displayModeBar: false })"]
    assert "const drawn = Charts.plain(" in code
    assert 'value.replace(/&/g, "&amp;").replace(/</g, "&lt;")' in code


def test_questions_have_one_key_whatever_their_order():
    assert (
        key_of("r", "sample", {"b": "2", "a": "1"}) == key_of("r", "sample", {"a": "1", "b": "2"}) == "r/sample?a=1&b=2"
    )
