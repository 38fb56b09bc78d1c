"""A run directory that a stranger made: no command follows a link out of it, runs its code, or shows its text raw."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from running import letters, start, trained_steps
from typer.testing import CliRunner, Result

import penstock
from penstock.cli.main import app
from penstock.config.load import dump, validate
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.journal.writer import Journal
from penstock.launch.report import report
from penstock.launch.supervisor import exclusive
from penstock.records.ids import PipelineName
from penstock.runtime.rundir import RunDir
from penstock.train import checkpoint
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner

SECRET = "nobody-may-read-this"
SCRIPT = "<script>stolen()</script><img src=x onerror=stolen()>"
TABLES = {
    "env": {"name": "copy"},
    "model": {"kind": "tiny", "hidden": 16, "layers": 1, "heads": 2},
    "rollout": {"max_new_tokens": 2},
}


def penstock_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def write_lines(path: Path, *records: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with all files that a reader uses."""
    pipeline = {"name": "p", "steps": 4, **TABLES}
    run = RunDir.create(tmp_path / "runs", "r", dump(validate({"pipeline": [pipeline]})), "0")
    steps = [
        {"kind": "step", "at": 1e9 + step, "pipeline": "p", "step": step, "reward": step / 4, "loss": 0.5 * step}
        | {"staleness_mean": 0.0, "staleness_max": 0}
        for step in range(3)
    ]
    write_lines(run.metrics_path, *steps)
    sample = {"step": 2, "prompt": 1, "sample": 5, "version": 0, "reward": 0.5, "length": 3}
    pieces = [{"by": "context", "text": "say>"}, {"by": "policy", "text": "written"}]
    write_lines(run.rollouts("p") / "samples.jsonl", sample | {"pieces": pieces})
    run.log_path("controller").write_text("a line of the log\n")
    run.write_failure("p.trainer", "RunFailed", "it failed", 1)
    journal = Journal(run.journal_path, run.run_id)
    event = {"type": "ask_batch", "member": "m", "step": 2}
    notes = {"batch": [(3, 0, [5, 6])]}
    journal.append(PipelineName("p"), 1e9, msgspec.msgpack.encode(event), msgspec.msgpack.encode(notes))
    journal.close(5.0)
    run.write_ending("complete", status={"pipelines": {"p": {"step": 3, "steps": 4, "conservation_error": 0}}})
    return run


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Another folder of the user, with a file for every name that a reader or a writer of a run uses."""
    folder = tmp_path / "outside"
    for name in ("p/samples.jsonl", "controller.log", "p.trainer.json", "rewards.png", "tensorboard.offset", "file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"message": SECRET, "pieces": [], "step": 1, "sample": 1}) + "\n")
    return folder


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


READERS: dict[str, Callable[[RunDir, Path], object]] = {
    "report": lambda run, place: penstock_command("report", run.root),
    "export": lambda run, place: penstock_command("dashboard", run.root, "--export", place / "run.html"),
    "story": lambda run, place: penstock_command("story", run.root, "step:2"),
    "doctor": lambda run, place: penstock_command("doctor", run.root),
    "doctor of the past": lambda run, place: penstock_command("doctor", run.root, "--at", "1"),
    "replay": lambda run, place: penstock_command("replay", run.root),
    "publish": lambda run, place: penstock_command("publish", run.root, "--to", "tensorboard"),
    "notebook": lambda run, place: penstock.Run(run.root)._repr_html_(),
    "plot": lambda run, place: penstock.Run(run.root).plot(),
    "metrics": lambda run, place: penstock.Run(run.root).metrics(),
}
LINKED = {
    "marker": ["run.json"],
    "configuration": ["config.toml"],
    "journal": ["journal.sqlite"],
    "journal's files": ["journal.sqlite-wal", "journal.sqlite-shm"],
    "small files": ["metrics.jsonl", "ending.json", "controller.json", "supervisor.lock"],
    "folders": ["logs", "rollouts", "failures", "plots", "sinks", "tensorboard", "checkpoints"],
    "a folder in a folder": ["rollouts/p", "checkpoints/p"],
    "files in folders": [
        *("logs/controller.log", "rollouts/p/samples.jsonl", "failures/p.trainer.json"),
        *("report.html", "plots/rewards.png", "plots/rewards.svg", "sinks/tensorboard.offset"),
    ],
}


def link(path: Path, outside: Path) -> None:
    """Puts a link to the same name outside in the place of the file or the folder."""
    same = outside / path.name
    folder = path.name in ("logs", "rollouts", "failures", "plots", "sinks", "tensorboard", "checkpoints")
    target = outside if folder else same if same.exists() else outside / "file"
    if path.is_dir():
        path.rename(path.with_name(f"former-{path.name}"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("names", LINKED.values(), ids=LINKED)
def test_no_link_is_followed(names: list[str], run: RunDir, outside: Path, tmp_path: Path):
    for name in names:
        link(run.root / name, outside)
    before = everything_in(outside)
    shown = tmp_path / "shown"
    shown.mkdir()
    for read in READERS.values():
        try:
            result = read(run, shown)
        except (penstock.PenstockError, OSError) as error:
            result = error
        said = result.output + str(result.exception) if isinstance(result, Result) else str(result)
        assert SECRET not in said
    assert everything_in(outside) == before
    written = [run.root / "report.html", shown / "run.html"]
    assert not [path for path in written if not path.is_symlink() and path.exists() and SECRET in path.read_text()]


def test_without_links_every_reader_works(run: RunDir, tmp_path: Path):
    """The witness of the test above: its commands read and write when nothing is linked."""
    pytest.importorskip("tensorboard")
    for name in ("report", "export", "story", "publish"):
        result = READERS[name](run, tmp_path)
        assert isinstance(result, Result)
        assert result.exit_code == 0, (name, result.output, result.exception)
    READERS["plot"](run, tmp_path)
    made = ["report.html", "plots/rewards.png", "plots/rewards.svg", "sinks/tensorboard.offset"]
    assert all((run.root / name).is_file() for name in made)
    assert "a line of the log" in (tmp_path / "run.html").read_text()
    assert "written" in report(run)


class Elements(HTMLParser):
    """The elements of a page and all their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.policy = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        named = dict(attrs)
        if tag == "meta" and named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"] or ""


def is_harmless(page: str) -> bool:
    found = Elements(page)
    return not {"script", "img"} & set(found.tags) and not [name for name in found.attributes if name.startswith("on")]


@pytest.mark.parametrize("how", [SCRIPT, None, 5, ["complete"]])
def test_the_end_of_a_run_is_one_of_few_words(how: object, run: RunDir):
    run.ending_path.write_text(json.dumps({"how": how}))
    with pytest.raises(penstock.ConfigError, match=r"ending\.json is damaged"):
        penstock.Run(run.root)._repr_html_()
    assert SCRIPT not in str(penstock_command("report", run.root).output)


def test_texts_are_escaped_in_the_report(run: RunDir):
    sample = {"step": SCRIPT, "sample": SCRIPT, "reward": SCRIPT, "pieces": [{"by": f'"{SCRIPT}', "text": SCRIPT}]}
    write_lines(run.rollouts("p") / "samples.jsonl", sample)
    one = {"step": SCRIPT, "steps": SCRIPT, "issued": SCRIPT, "conservation_error": SCRIPT, "samples_leased": SCRIPT}
    run.write_ending("failed", SCRIPT, wall_s=SCRIPT, status={"pipelines": {"p": one, SCRIPT: one}})
    metric = {"kind": "step", "at": 1, "pipeline": SCRIPT, "step": 0, "reward": 0.5, SCRIPT: 1.0}
    write_lines(run.metrics_path, metric, metric | {"step": 1, SCRIPT: 2.0, "loss": SCRIPT}, {"kind": [SCRIPT]})
    run.write_failure("p.trainer", SCRIPT, SCRIPT, 1)
    run.log_path("supervisor").write_text(f"2026 WARNING {SCRIPT}: {SCRIPT}\n")
    page = report(run)
    assert "stolen()" in page
    assert is_harmless(page)
    assert not is_harmless(page.replace("&lt;", "<"))


def test_the_report_may_not_execute_or_fetch_anything(run: RunDir):
    found = Elements(report(run))
    assert found.policy.startswith("default-src 'none';")
    assert "script" not in found.policy


def test_texts_are_escaped_in_a_notebook(run: RunDir):
    step = {"kind": "step", "at": 1, "pipeline": SCRIPT, "step": 0, "reward": 0.5, "staleness_mean": 0.0}
    write_lines(run.metrics_path, step | {"staleness_max": 0})
    shown = penstock.Run(run.root)._repr_html_()
    assert "stolen()" in shown
    assert is_harmless(shown)
    assert not re.search(r"<(?!/?(b|br|svg|text|line|circle|polyline)\b)", shown)


def test_texts_do_not_control_the_terminal(run: RunDir):
    journal = Journal(run.journal_path, run.run_id)
    event = {"type": "ask_batch", "member": "\x1b]0;title\x07m\n2026-01-01 forged", "step": 2}
    notes = {"batch": [(3, 0, [5, 6])]}
    journal.append(PipelineName("p"), 1e9, msgspec.msgpack.encode(event), msgspec.msgpack.encode(notes))
    journal.close(5.0)
    told = penstock_command("story", run.root, "step:2").output
    assert "\\x1b]0;title\\x07m\\n2026-01-01 forged" in told
    assert len(told.splitlines()) == 2
    run.write_ending("failed", "\x1b[2Jcleared")
    diagnosed = penstock_command("doctor", run.root).output
    assert "\\x1b[2Jcleared" in diagnosed
    assert "\x1b" not in told + diagnosed


@pytest.mark.parametrize("named", ["-1", "0", "1", "other"])
def test_a_process_that_does_not_hold_the_lock_is_not_signalled(
    named: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
):
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    run.ending_path.unlink()
    with exclusive(run):
        run.lock_path.write_text(named)
        with pytest.raises(TimeoutError):
            penstock.Run(run.root).stop(timeout_s=0.0)
        assert signalled == []
        run.lock_path.write_text(str(os.getpid()))
        with pytest.raises(TimeoutError):
            penstock.Run(run.root).stop(timeout_s=0.0)
    assert signalled == [os.getpid()]


ALPHABET = "abcdefghijklmnopqrstuvwxyz>"
CODE = f"""
from pathlib import Path

from penstock import Prompt

Path(__file__).with_name("witness").touch()


class Theirs:
    alphabet = "{ALPHABET}"
    count = None

    def __init__(self, seed=0): ...

    def prompt(self, position):
        return Prompt(text="a>", columns={{}})

    def score(self, prompts, completions, **columns):
        return [1.0 for _ in completions]


class Workload: ...
"""


@pytest.fixture
def foreign(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Made by somebody else, with a checkpoint. The module of its environment leaves a witness when it is imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (run.root / "code").mkdir()
    (run.root / "code" / "foreign_code.py").write_text(CODE)
    pipeline = {"name": "p", "steps": 4, **TABLES, "env": {"name": "foreign_code:Theirs"}}
    tables = {"run": {"extra_path": [str(run.root / "code")]}, "pipeline": [pipeline]}
    run.config_path.write_text(dump(validate(tables)))
    policy = build(TinyLanguageModel(alphabet=ALPHABET, hidden_size=16, layers=1, heads=2))
    assert isinstance(policy, LanguagePolicy)
    learner = Learner(TokenObjective(policy, TokenLossSection(), packing="padded"), OptimizerSection())
    checkpoint.save(run.checkpoints("p"), learner)
    run.ending_path.unlink()
    (run.root / "origin.json").unlink()
    yield run
    sys.modules.pop("foreign_code", None)


def imported(run: RunDir) -> bool:
    return (run.root / "code" / "witness").exists()


RUNS_CODE = {
    "resume --dry-run": lambda run: ["run", "--resume", run.root, "--dry-run"],
    "run CONFIG": lambda run: ["run", run.config_path, "--dry-run"],
    "check": lambda run: ["check", run.config_path],
    "slurm": lambda run: ["slurm", run.config_path],
    "eval": lambda run: ["eval", run.root, "--prompts", "2"],
}


@pytest.mark.parametrize("arguments", RUNS_CODE.values(), ids=RUNS_CODE)
def test_code_of_a_foreign_run_is_run_only_if_it_is_trusted(
    arguments: Callable[[RunDir], list[str | Path]], foreign: RunDir
):
    refused = penstock_command(*arguments(foreign))
    assert isinstance(refused.exception, penstock.ConfigError)
    assert "was made by another user or on another machine" in str(refused.exception)
    assert not imported(foreign)
    trusted = penstock_command(*arguments(foreign), "--trust")
    assert trusted.exit_code == 0, trusted.output
    assert imported(foreign)


@pytest.mark.parametrize("arguments", RUNS_CODE.values(), ids=RUNS_CODE)
def test_code_of_the_users_own_run_is_run_without_asking(
    arguments: Callable[[RunDir], list[str | Path]], foreign: RunDir
):
    foreign.write_config(foreign.config_path.read_text())  # marks it
    assert penstock_command(*arguments(foreign)).exit_code == 0
    assert imported(foreign)


@pytest.mark.parametrize(
    "arguments",
    [["run", "--resume"], ["run", "--set", "run.seed=1", "--resume"], ["attach"], ["publish", "--to", "tensorboard"]],
    ids=lambda arguments: arguments[0],
)
def test_a_foreign_run_is_not_continued_without_trust(arguments: list[str], foreign: RunDir):
    before = everything_in(foreign.root)
    refused = penstock_command(*arguments, foreign.root)
    assert "--trust" in str(refused.exception)
    assert everything_in(foreign.root) == before


def test_training_with_the_configuration_of_a_foreign_run_is_refused(foreign: RunDir):
    with pytest.raises(penstock.ConfigError, match="made by another user"):
        penstock.train(foreign.config_path)
    assert not imported(foreign)


def test_a_workload_of_a_foreign_run_does_not_evaluate_it(foreign: RunDir):
    text = foreign.config_path.read_text()
    foreign.config_path.write_text(
        text.replace("[pipeline.rollout]", '[pipeline.rollout]\nworkload = "foreign_code:Workload"')
    )
    refused = penstock_command("eval", foreign.root, "--env", "copy", "--prompts", "2")
    assert "evaluating it runs its workload" in str(refused.exception)
    assert not imported(foreign)


def test_all_else_runs_no_code_of_a_foreign_run(foreign: RunDir, tmp_path: Path):
    others = [
        ["sample", foreign.root, "ab>", "--count", "2"],
        ["eval", foreign.root, "--env", "copy", "--prompts", "2"],
        ["export", foreign.root, "--to", tmp_path / "exported"],
        ["story", foreign.root, "step:2"],
        ["replay", foreign.root],
        ["report", foreign.root],
        ["dashboard", foreign.root, "--export", tmp_path / "run.html"],
    ]
    results = {str(one[0]): penstock_command(*one) for one in others}
    assert not imported(foreign)
    assert {name: found.exception for name, found in results.items() if found.exit_code and name != "replay"} == {}
    for name in ("notebook", "plot", "metrics", "doctor"):
        READERS[name](foreign, tmp_path)
    assert not imported(foreign)
    assert "foreign_code" not in sys.modules


def test_a_linked_checkpoint_of_a_foreign_run_is_not_exported(foreign: RunDir, tmp_path: Path):
    [step] = foreign.checkpoints("p").iterdir()
    model = step / "model.safetensors"
    model.rename(tmp_path / "elsewhere")
    model.symlink_to(tmp_path / "elsewhere")
    refused = penstock_command("export", foreign.root, "--to", tmp_path / "exported")
    assert "links are not followed" in str(refused.exception)
    foreign.write_config(foreign.config_path.read_text())
    assert penstock_command("export", foreign.root, "--to", tmp_path / "exported").exit_code == 0


@pytest.mark.slow
def test_a_foreign_run_that_is_trusted_once_is_the_users_own(folder: Path):
    running = start(folder, letters(folder, steps=5))
    assert running.end()[0] == 0
    run = RunDir.open(running.directory)
    (run.root / "origin.json").unlink()
    longer = ["--resume", run.root, "--set", "pipeline.letters.steps=6"]
    code, said = start(folder, *longer).end()
    assert code == 2
    assert "--trust" in said
    assert start(folder, *longer, "--trust").end()[0] == 0
    assert trained_steps(run.root) == 6
    assert start(folder, *longer[:-1], "pipeline.letters.steps=7").end()[0] == 0
    assert trained_steps(run.root) == 7
