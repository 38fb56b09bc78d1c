"""What is wrong gets one clear sentence and a sensible exit code; what is only partly wrong costs only that part."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from running import letters, start, step_lines

pytestmark = pytest.mark.timeout(180)

TINY = 'kind = "tiny"\nhidden = 32\nlayers = 1\nheads = 2'


def with_environment(folder: Path, source: str, **options: object) -> Path:
    """A configuration whose environment is the class `Mine` of the given source."""
    (folder / "mine.py").write_text(source)
    config = letters(folder, run=f'extra_path = ["{folder}"]', **options)  # type: ignore[arg-type]
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    return config


MINE = """
from penstock.envs.tasks import Copy

class Mine(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed)
"""


def test_a_model_path_that_does_not_exist_is_named_before_anything_starts(folder: Path):
    config = letters(folder)
    config.write_text(config.read_text().replace(TINY, 'kind = "path"\npath = "nowhere"'))
    code, output = start(folder, config).end(30)
    assert code == 2
    assert "'nowhere' is not a directory" in output
    assert not (folder / "runs").exists()


def test_a_model_that_cannot_be_loaded_fails_the_run_with_the_process_own_error(folder: Path):
    (folder / "empty").mkdir()
    config = letters(folder)
    config.write_text(config.read_text().replace(TINY, f'kind = "path"\npath = "{folder / "empty"}"'))
    code, output = start(folder, config).end(60)
    assert code == 2
    assert "cannot load a language model from" in output


def test_an_environment_that_cannot_be_made(folder: Path):
    source = MINE + "        raise RuntimeError('the dataset is gone')\n"
    code, output = start(folder, with_environment(folder, source)).end(60)
    assert code == 2
    assert "the dataset is gone" in output


def test_prompts_that_raise_are_set_aside_and_the_run_goes_on(folder: Path):
    source = (
        MINE
        + """
    def prompt(self, position):
        if position % 5 == 3:
            raise ValueError(f"prompt {position} is broken")
        return super().prompt(position)
"""
    )
    run = start(folder, with_environment(folder, source, steps=6))
    code, output = run.end()
    assert code == 0, output
    assert len(step_lines(run.directory)) == 6
    assert "failed" in output  # in the summary's column of drops


def test_an_environment_that_always_raises_fails_the_run_with_its_error(folder: Path):
    source = (
        MINE
        + """
    def prompt(self, position):
        if position:
            raise ValueError("every prompt is broken")
        return super().prompt(position)
"""
    )
    code, output = start(folder, with_environment(folder, source, steps=6)).end()
    assert code == 1
    assert "every prompt is broken" in output


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[1.0]", "must return one reward per completion"),
        ("[float('nan')] * len(completions)", "rewards must be finite"),
    ],
)
def test_rewards_that_cannot_be_used(folder: Path, returned: str, expected: str):
    source = (
        MINE
        + f"""
    def score(self, prompts, completions, **columns):
        return {returned}
"""
    )
    code, output = start(folder, with_environment(folder, source)).end()
    assert code == 1
    assert expected in output
    assert "score" in output


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_was_trained(folder: Path):
    extra = "[pipeline.optimizer]\nlearning_rate = 1e30\n"
    run = start(folder, letters(folder, steps=50, checkpoint_every=1, extra=extra))
    code, output = run.end()
    assert code == 1
    assert "the update was not applied" in output
    assert list((run.directory / "checkpoints" / "letters").glob("step-*/checkpoint.json"))


def test_a_port_in_use(folder: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = start(folder, letters(folder, extra=f"[control]\nport = {port}\n")).end(60)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in output


def test_a_run_directory_of_another_version(folder: Path):
    run = start(folder, letters(folder, steps=1))
    assert run.end()[0] == 0
    marker = run.directory / "run.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 0, "penstock": "0.0.1"}))
    code, output = start(folder, "--resume", run.directory).end(30)
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 1}))
    assert code == 2
    assert "made by Penstock 0.0.1 in format 0" in output


def test_a_journal_that_is_not_one(folder: Path):
    run = start(folder, letters(folder, steps=1))
    assert run.end()[0] == 0
    for path in run.directory.glob("journal.sqlite*"):
        path.unlink()
    (run.directory / "journal.sqlite").write_bytes(b"not a database" * 1000)
    code, output = start(folder, "--resume", run.directory, "--set", "pipeline.letters.steps=2").end(60)
    assert code == 1
    assert "journal" in output
    assert "Traceback" not in output


def test_steps_that_change_nothing_do_not_stop_the_run(folder: Path):
    """All rewards are equal and there is no entropy bonus: no gradient, and every version has the same bytes."""
    source = MINE + "\n    def score(self, prompts, completions, **columns):\n        return [0.0] * len(prompts)\n"
    config = with_environment(folder, source, steps=12, extra="[pipeline.token_loss]\nentropy_coefficient = 0.0\n")
    run = start(folder, config)
    code, output = run.end(90)
    assert code == 0, output
    assert len(step_lines(run.directory)) == 12
    last = step_lines(run.directory)[-1]
    assert last["staleness_max"] <= 2, last
