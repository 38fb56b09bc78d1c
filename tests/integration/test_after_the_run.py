"""What a run leaves, used: export, evaluation, samples, report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import letters, no_leftovers, start

from penstock.errors import ConfigError
from penstock.roles.offline import _measured, saved, served_by

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    yield from no_leftovers(tmp_path)


def penstock(folder: Path, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_a_run_to_a_model_and_a_report(tmp_path: Path):
    more = "[pipeline.evaluation]\nevery_steps = 5\nprompts = 8\n[pipeline.samples]\nsave_every_steps = 5\n"
    running = start(tmp_path, letters(tmp_path, steps=10, checkpoint_every=5, extra=more))
    assert running.end()[0] == 0
    run = running.directory
    penstock(tmp_path, "export", run, "--to", "model")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = tokenizer("abcd>", return_tensors="pt").input_ids
    generated = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(prompt[0]) == "abcd>"
    said = tokenizer.decode(generated[0][prompt.shape[1] :], skip_special_tokens=True)
    ours = penstock(tmp_path, "sample", run, "abcd>", "--temperature", "0", "--max-new-tokens", "4")
    assert ours.strip("\n") == said
    of_run = penstock(tmp_path, "eval", run, "--prompts", "16").splitlines()[-1]
    assert re.match(r"reward \S+, 95 % interval \S+ to \S+, 16 prompts, 16 samples", of_run)
    drawn = ["--prompts", "4", "--samples", "2", "--temperature", "1", "--engine", "kind=torch", "--engine", "rows=2"]
    assert "4 prompts, 8 samples" in penstock(tmp_path, "eval", "model", "--env", "copy", *drawn)
    penstock(tmp_path, "report", run, "--to", "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "complete" in page
    assert "Accounting: adds up" in page
    assert page.count("<svg") > 3
    assert not re.search(r"(src|href)=|@import|url\(", page), "the page must not fetch anything"


REWARD = """
def seen(prompts, completions, *, row, **columns):
    with open("seen", "a") as file:
        file.writelines(f"{one}\\n" for one in row)
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("every_steps", [0, 5])
def test_rows_that_were_trained_on_are_not_evaluated_on(tmp_path: Path, every_steps: int):
    rows = [{"prompt": f"{'abcd'[row % 4]}>", "answer": "a", "row": row} for row in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "seeing.py").write_text(REWARD)
    env = 'name = "jsonl"\nrewards = ["seeing:seen"]\noptions = { path = "rows.jsonl" }'
    evaluation = f"[pipeline.evaluation]\nevery_steps = {every_steps}\nprompts = 4\n"
    path = letters(tmp_path, steps=5, run='extra_path = ["."]', extra=evaluation)
    path.write_text(path.read_text().replace('name = "copy"', env))
    running = start(tmp_path, path)
    assert running.end()[0] == 0
    held_out = 4 if every_steps else 0
    refused = evaluated(tmp_path, running.directory, held_out + 1)
    assert refused.returncode == 2
    assert f"the run held out {held_out} rows" in refused.stderr
    if every_steps:
        (tmp_path / "seen").unlink()
        assert evaluated(tmp_path, running.directory, 3).returncode == 0
        assert {int(row) for row in (tmp_path / "seen").read_text().split()} == {6, 7, 8}


def evaluated(folder: Path, run: Path, prompts: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "eval", str(run), "--prompts", str(prompts)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_mistakes_say_what_there_is(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "penstock.cli.main", "eval", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "name one with --env" in done.stderr


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "abacus"}, "choose torch, vllm"),
        ({"kind": "torch", "rowz": 2}, "rowz"),
        ({"kind": "vllm"}, "reads the versions that a run publishes"),
    ],
)
def test_engines_that_cannot_be_asked_are_refused(table: dict[str, object], said: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=said):
        served_by(saved(tmp_path, env={"name": "copy"}), table)


def test_intervals():
    yes_or_no = _measured([[1.0]] * 50, 0)
    assert yes_or_no.high == 1.0
    assert 0.9 < yes_or_no.low < 1.0
    graded = _measured([[0.2, 0.4], [0.6, 0.8]] * 8, 1)
    assert graded.mean == pytest.approx(0.5)
    assert graded.low < 0.5 < graded.high
    assert (graded.prompts, graded.samples, graded.failed) == (16, 32, 1)
