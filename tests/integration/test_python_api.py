"""`penstock.train` and `penstock.Run`, from a script and from a notebook."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from running import letters, no_leftovers, start

import penstock

TINY = {"kind": "tiny", "hidden": 32, "heads": 2}
SMALL = {"rollout": {"group_size": 4, "batch_samples": 16, "max_new_tokens": 4}, "train": {"groups_per_step": 4}}

SCRIPT = """
import penstock

WORTH = 2.0

def worth(prompts, completions, **columns):
    return [WORTH for _ in completions]

run = penstock.train(environment="copy", reward=worth, model={model!r}, steps={steps}, name="script", **{small!r})
print("started", flush=True)
{then}
"""


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    yield from no_leftovers(tmp_path)


def script(folder: Path, then: str, steps: int = 3) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(model=TINY, steps=steps, small=SMALL, then=then))
    return path


@pytest.mark.slow
def test_a_script_iterates_over_steps_and_reads_metrics(tmp_path: Path):
    then = "for step in run: print('step', step['step'], step['reward'])\nprint(run.state, len(run.metrics()))"
    ended = subprocess.run(
        [sys.executable, script(tmp_path, then)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "step 2 2.0" in ended.stdout  # the script's own reward, with its constant
    assert "complete 3" in ended.stdout
    (found,) = (tmp_path / "runs").iterdir()
    attached = penstock.Run(found)
    assert attached.state == "complete"
    assert [step["step"] for step in attached] == [0, 1, 2]
    assert "<svg" in attached._repr_html_()
    picture = attached.plot()
    assert picture is not None
    assert picture._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_script_that_ends_waits_for_its_run(tmp_path: Path):
    subprocess.run([sys.executable, script(tmp_path, "")], cwd=tmp_path, timeout=120, check=True)
    (found,) = (tmp_path / "runs").iterdir()
    assert penstock.Run(found).state == "complete"


@pytest.mark.slow
def test_a_run_ends_gracefully_with_a_script_that_was_killed(tmp_path: Path):
    path = script(tmp_path, "run.wait()", steps=5000)
    with subprocess.Popen([sys.executable, path], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        (found,) = (tmp_path / "runs").iterdir()
        run = penstock.Run(found)
        next(iter(run))
        process.kill()
    deadline = time.monotonic() + 30
    while run.state == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.state == "interrupted"


@pytest.mark.slow
def test_a_run_started_in_a_terminal_can_be_followed_and_stopped(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=5000))
    run = penstock.Run(running.directory)
    following = iter(run)
    assert next(following)["step"] == 0
    assert run.stop().state == "interrupted"
    assert running.end()[0] == 130


def test_a_run_that_fails_raises_its_sentence(tmp_path: Path):
    run = _over(tmp_path, "failed", "the reward 'f' returned a string")
    with pytest.raises(penstock.RunFailed, match="returned a string"):
        run.wait()


def test_metrics_are_a_frame_where_pandas_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = _over(tmp_path, "complete", "")
    (run.path / "metrics.jsonl").write_text(
        '{"kind":"step","pipeline":"a","step":0,"reward":0.1}\n{"kind":"step","pipeline":"a","step":0,"reward":0.2}\n'
    )
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["reward"] for row in run.metrics()] == [0.2]
    frames = ModuleType("pandas")
    frames.DataFrame = lambda rows: SimpleNamespace(rows=rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert len(run.metrics().rows) == 1


def test_a_run_that_was_stopped_before_it_began_is_interrupted(tmp_path: Path):
    run = _over(tmp_path, "complete", "")
    (run.path / "ending.json").unlink()
    stopped: Any = SimpleNamespace(poll=lambda: 130, returncode=130)  # Ctrl-C while its supervisor was imported
    assert penstock.Run(run.path, stopped).wait().state == "interrupted"


def one_at_a_time(completion: str) -> float:
    return float(len(completion))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model": "Qwen/Qwen2.5-0.5B"}, "'hub:Qwen/Qwen2.5-0.5B'"),
        ({"rolout": {}}, "did you mean 'rollout'"),
        ({"environment": "copi"}, "did you mean 'copy'"),
        ({"reward": lambda prompts, completions: []}, "is a lambda"),
        ({"reward": sys.getsizeof}, "expected a function"),
        ({"reward": one_at_a_time}, "has a parameter 'completion', which nothing provides"),
        ({"rollout": {"group_sise": 3}}, "group_size"),
        ({"enviroment": "copy"}, "did you mean 'environment'"),
        ({"environment": SimpleNamespace()}, "pass the class itself"),
        ({"environment": {"rewards": []}}, "needs environment="),
        ({"config": {"pipeline": [{"name": "a"}]}, "model": None}, "needs model="),
        ({"config": {"pipeline": [{"name": "a"}, {"name": "b"}]}}, "there are several"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(tmp_path: Path, settings: dict[str, Any], expected: str):
    with pytest.raises(penstock.ConfigError, match=expected):
        penstock.train(
            **{"environment": "copy", "model": TINY, "steps": 1, "run": {"dir": tmp_path / "runs"}} | settings
        )
    assert not list((tmp_path / "runs").glob("*"))


def _over(folder: Path, how: Any, sentence: str) -> penstock.Run:
    from penstock.config.load import dump, validate
    from penstock.runtime.rundir import RunDir

    tree = {"pipeline": [{"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}]}
    run = RunDir.create(folder / "runs", "over", dump(validate(tree)), "0")
    run.write_ending(how, sentence, mistake=False)
    return penstock.Run(run.root)


NOTEBOOK = [
    "import penstock\nWORTH = 2.0",
    "class Task:\n    alphabet, count = 'ab>', None\n    def __init__(self, seed=0):\n        self.seed = seed\n"
    "    def prompt(self, position):\n        return penstock.Prompt(text='ab'[position % 2] + '>')\n"
    "    def score(self, prompts, completions, **columns):\n        return [0.0 for _ in completions]",
    "def worth(prompts, completions, **columns):\n    return [WORTH for _ in completions]",
    f"run = penstock.train(environment=Task, reward=worth, model={TINY!r}, steps=3, **{SMALL!r})",
    "rewards = [step['reward'] for step in run]\nassert rewards == [2.0] * 3, rewards\nrun",
    "run.plot()",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what the kernel's libraries warn of is theirs
def test_in_a_notebook(tmp_path: Path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in NOTEBOOK])
    done = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown, picture = done.cells[-2].outputs[-1].data, done.cells[-1].outputs[-1].data
    assert "complete" in shown["text/html"]
    assert "<svg" in shown["text/html"]
    assert "image/png" in picture
