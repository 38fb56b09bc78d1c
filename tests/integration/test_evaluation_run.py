"""Real runs that evaluate while they train: exact books, also when processes are killed in the middle of a point."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running import Running, letters, start, trained_prompts, wait_for

from penstock.errors import RunFailed
from penstock.journal.reader import history
from penstock.journal.story import story_lines
from penstock.records.ids import PipelineName

PROMPTS = 12

SLOW = """
import random
import time
from penstock.envs.tasks import Copy

class Slow(Copy):
    '''Held-out prompts take their time, so that there is an evaluation to kill things in.'''

    def __init__(self, seed=0):
        super().__init__(seed=seed)

    def score(self, prompts, completions, **columns):
        time.sleep(random.uniform(0.2, 4.0) if self.seed else 0.02)  # groups are scored at the same time
        return super().score(prompts, completions, **columns)
"""

CARTPOLE = """
[[pipeline]]
name = "cartpole"
steps = 4
[pipeline.env]
name = "gymnasium"
options = { id = "CartPole-v1" }
[pipeline.model]
kind = "mlp"
[pipeline.rollout]
group_size = 1
batch_samples = 8
[pipeline.train]
groups_per_step = 8
[pipeline.evaluation]
every_steps = 2
prompts = 5
temperature = 1.0
samples = 2
"""


def evaluation(every: int, **settings: Any) -> str:
    lines = "\n".join(f"{name} = {value}" for name, value in settings.items())
    return f"[pipeline.evaluation]\nevery_steps = {every}\nprompts = {PROMPTS}\n{lines}\n"


def slow(folder: Path, *, steps: int, every: int) -> Path:
    (folder / "mine.py").write_text(SLOW)
    run = f'extra_path = ["{folder}"]\nmax_restarts = 100'
    config = letters(folder, steps=steps, run=run, extra=evaluation(every))
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Slow"'))
    return config


def points(directory: Path, pipeline: str = "letters") -> list[dict[str, Any]]:
    """The lines of evaluations in the metrics, the last one of every point that was due."""
    found: dict[int, dict[str, Any]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        if '"kind":"evaluation"' in line:
            entry = json.loads(line)
            if entry["pipeline"] == pipeline:
                found[entry["due"]] = entry
    return [found[due] for due in sorted(found)]


class Books:
    """What the journal says of a pipeline's evaluations."""

    def __init__(self, directory: Path, pipeline: str = "letters") -> None:
        self.results: list[dict[str, Any]] = []
        self.lost: list[str] = []
        """Members that were let go of while they held samples of an evaluation."""
        self._prompts: dict[int, tuple[int, int]] = {}
        self._digests: dict[int, set[str]] = {}
        self._scores: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}
        self._held: dict[int, str] = {}
        for entry in history(directory / "journal.sqlite"):
            if entry.pipeline == pipeline:
                notes = msgspec.msgpack.decode(entry.decided) if entry.decided else {}
                self._read(msgspec.msgpack.decode(entry.body), notes)

    @property
    def running(self) -> bool:
        """Samples of a point are out, and some of it are in already."""
        return bool(self._held) and bool(self._scores)

    def _read(self, event: dict[str, Any], notes: dict[str, Any]) -> None:
        for prompt, _, samples in notes.get("evaluation_leases", ()):
            self._prompts |= {sample: (prompt, index) for index, sample in enumerate(samples)}
            self._held |= dict.fromkeys(samples, event["member"])
        gone = {member for member, _ in notes.get("evicted", ())}
        gone |= {event["member"]} if event["type"] == "unregister" else set()
        for sample in [sample for sample, member in self._held.items() if member in gone]:
            self.lost.append(self._held.pop(sample))
        match event["type"]:
            case "publish_weights":
                manifest = event["manifest"]
                self._digests.setdefault(manifest["version"], set()).add(manifest["digest"])
            case "run_resumed":
                self._held.clear()
                self._scores.clear()
            case "deliver":
                refused = notes.get("refused", ((), ""))[0]
                for sample, version, newest, digest, reward, _ in event.get("scores", ()):
                    self._held.pop(sample, None)
                    if sample not in refused:
                        assert version == newest, f"sample {sample} was made with versions {version} to {newest}"
                        assert digest in self._digests[version]
                        scores = self._scores.setdefault(version, {})
                        assert self._prompts[sample] not in scores, "a sample was counted twice"
                        scores[self._prompts[sample]] = {"reward": reward, "digest": digest}
        for result in notes.get("evaluations", ()):
            self._ended(result)

    def _ended(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        scores = self._scores.get(result["version"], {})
        if not result["skipped"]:
            assert result["samples"] == len(scores)
            assert len({score["digest"] for score in scores.values()}) == 1
            mean = sum(score["reward"] for score in scores.values()) / len(scores)
            assert result["reward_mean"] == pytest.approx(mean)
        self._scores.clear()
        self._held.clear()


def assert_exact(directory: Path, *, last: int, every: int, first: int = 0) -> Books:
    """Every point that was due ended once, complete or with a reason, and the metrics say what the journal says."""
    books = Books(directory)
    assert not books.running
    lines = points(directory)
    due = {line["due"] for line in lines}
    evaluated = {line["version"] for line in lines if "skipped" not in line}
    assert last in evaluated, lines
    assert min(evaluated) <= first, lines
    assert all(version in due | evaluated for version in range(0, last + 1, every)), lines
    for line in lines:
        assert ("skipped" in line) != ("eval/reward" in line)
        if "skipped" not in line:
            assert line["eval/count"] == PROMPTS
            assert line["version"] >= line["due"]
            ours = next(result for result in reversed(books.results) if result["due"] == line["due"])
            assert (ours["version"], ours["reward_mean"]) == (line["version"], line["eval/reward"])
    return books


def ended_well(run: Running) -> tuple[Path, str]:
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    return run.directory, output


def in_the_middle(run: Running, after: int) -> Books:
    """Waits until an evaluation is under way, with at least `after` that ended before it."""

    def looks() -> Books | None:
        assert run.process.poll() is None, "the run ended before anything was killed"
        try:
            books = Books(run.directory)
        except RunFailed:  # the journal is only just being made
            return None
        return books if books.running and len(books.results) >= after else None

    return wait_for(looks, 120, "an evaluation under way")


@pytest.mark.timeout(300)
def test_letters_and_a_pole_are_evaluated_while_they_train(folder: Path):
    run = start(folder, letters(folder, steps=8, extra=evaluation(3) + CARTPOLE))
    directory, output = ended_well(run)
    books = assert_exact(directory, last=8, every=3)
    assert not books.lost
    pole = points(directory, "cartpole")
    assert [line["due"] for line in pole] == [0, 2, 4]
    made = [line for line in pole if "skipped" not in line]
    assert {0, 4} <= {line["version"] for line in made}
    assert all(line["eval/count"] == 10 and line["eval/length"] == line["eval/reward"] for line in made)
    prompts = trained_prompts(directory, "letters")
    assert sorted(prompts) == list(range(8 * 4)), "an evaluation's prompts were trained, or training's were skipped"
    shown = [json.loads(line) for line in (directory / "rollouts/letters/evaluations.jsonl").read_text().splitlines()]
    assert {line["version"] for line in shown} == {line["version"] for line in points(directory)} - {None}
    assert all(line["pieces"][-1]["by"] == "policy" for line in shown)
    told = "\n".join(story_lines(directory / "journal.sqlite", PipelineName("letters"), "version", 8))
    assert f"version 8 evaluated: reward {books.results[-1]['reward_mean']:.4g}" in told
    assert "first → last" in output, "the summary has a column of evaluations"


@pytest.mark.timeout(400)
def test_processes_are_killed_in_the_middle_of_an_evaluation(folder: Path):
    run = start(folder, slow(folder, steps=12, every=4))
    in_the_middle(run, 0)
    run.child("letters.rollout.0").send_signal(signal.SIGKILL)
    wait_for(lambda: Books(run.directory).lost, 60, "samples of an evaluation to be lost with their worker")
    in_the_middle(run, 1)
    run.child("controller").send_signal(signal.SIGKILL)
    directory, output = ended_well(run)
    # Training goes on while rewards are scored, so the evaluation that lost its worker is made of a later version.
    assert_exact(directory, last=12, every=4, first=4)
    assert output.count("SIGKILL") >= 2, output
    assert set(trained_prompts(directory).values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_resumed_in_the_middle_of_an_evaluation_makes_that_one_again_and_no_other(folder: Path):
    run = start(folder, slow(folder, steps=12, every=4))
    before = in_the_middle(run, 1)
    run.process.kill()
    run.process.communicate(timeout=10)
    ended = [result for result in before.results if not result["skipped"]]
    directory, _ = ended_well(start(folder, "--resume", run.directory))
    books = assert_exact(directory, last=12, every=4)
    assert books.results[: len(ended)] == ended
    assert set(trained_prompts(directory).values()) == {1}
