"""No process imports from the working directory: files there are data, whatever their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import letters, start, step_lines
from test_python_api import script

TRAPS = ("torch", "http", "json", "random", "secrets", "heapq", "numpy", "msgspec", "psutil", "uvloop", "vllm")
TRAP = "import sys\nopen({witness!r}, 'a').write(f'{{__name__}}: {{sys.orig_argv}}\\n')\n"


@pytest.fixture
def witness(folder: Path) -> Path:
    """Written if one of the files in `folder` is imported."""
    path = folder / "witness"
    for name in TRAPS:
        (folder / f"{name}.py").write_text(TRAP.format(witness=str(path)))
    (folder / "probe.py").write_text("import http, torch")
    subprocess.run([sys.executable, "-m", "probe"], cwd=folder, check=True)
    assert "torch: " in path.read_text(), "Python itself does import them"
    path.unlink()
    return path


@pytest.mark.smoke
def test_a_check_imports_nothing_from_the_working_directory(folder: Path, witness: Path):
    letters(folder, steps=2)
    code, output = start(folder, "run.toml", command="check").end(60)
    assert code == 0, output
    assert not witness.exists(), witness.read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("preload", [True, False])
def test_a_run_imports_nothing_from_the_working_directory(folder: Path, witness: Path, preload: bool):
    """Every role: trainer and rollout ranks, reward and preparation processes, a metrics sink, heartbeats."""
    pytest.importorskip("tensorboard")
    extra = f'[metrics]\nsinks = ["tensorboard"]\n[launch]\npreload = {str(preload).lower()}\n'
    config = letters(folder, steps=3, rollout="ranks = 2\npreparation_processes = 1", extra=extra)
    text = config.read_text().replace("[pipeline.train]", "[pipeline.train]\nranks = 2")
    config.write_text(text.replace('name = "copy"', 'name = "copy"\nreward_processes = 1'))
    run = start(folder, config)
    code, output = run.end(250)
    assert code == 0, output + run.logs()
    assert len(step_lines(run.directory)) == 3
    assert not witness.exists(), witness.read_text()


@pytest.mark.timeout(200)
def test_the_python_api_imports_nothing_from_the_working_directory(folder: Path, witness: Path):
    """The script lies elsewhere: its own directory is on its path, and stays there."""
    (folder / "mine").mkdir()
    path = script(folder / "mine", "run.wait()\nprint(run.state)", steps=2)
    ran = subprocess.run(
        [sys.executable, "-P", path],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "complete" in ran.stdout
    assert not witness.exists(), witness.read_text()
