"""What README and docs say can be done can be done: links lead somewhere, commands exist, code is accepted."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli.main import app
from penstock.config.check import check_environment
from penstock.config.load import load, validate
from penstock.config.reference import keys
from penstock.config.run import Config
from penstock.roles.environments import environment_of
from penstock.runtime.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMING_FROM = ROOT / "docs" / "coming-from.md"
GUIDES = [COMING_FROM, *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert heading in {anchor(one) for one in headings}, target


def test_commands_of_the_docs_exist():
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    text = "\n".join(page.read_text() for page in PAGES if "decisions" not in page.parts)
    named = set(re.findall(r"(?:^ *|`)penstock ([a-z]+)\b", text, re.MULTILINE))
    assert {"run", "check", "keys", "story"} <= named
    assert named <= commands


def keys_in(tree: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for table in value:
                yield from keys_in(table, f"{path}{name}.NAME.")
        elif isinstance(value, dict) and name != "options":
            yield from keys_in(value, f"{path}{name}.NAME." if name == "pipeline" else f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_configurations_of_the_docs_have_keys_that_exist():
    known = {key.path for key in keys()}
    found: list[str] = []
    for page in PAGES:
        for block in blocks(page, "toml"):
            found.extend(keys_in(tomllib.loads(block)))
    assert len(found) > 20
    assert set(found) <= known


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_configurations_of_the_guides_are_accepted(page: Path):
    for block in blocks(page, "toml"):
        validate(tomllib.loads(block))


def test_jobs_of_other_frameworks_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With their own data: TRL's columns stand beside the prompt, verl's answer in the column `reward_model`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    monkeypatch.setattr("penstock.config.check._check_packages", lambda config: None)
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(msgspec.json.encode(row).decode() + "\n")
    [verl_reward] = [block for block in blocks(COMING_FROM, "python") if "my_reward.py" in block]
    (tmp_path / "my_reward.py").write_text(verl_reward)
    configurations = blocks(COMING_FROM, "toml")
    assert len(configurations) == 2
    for block in configurations:  # parquet needs the extra `data`
        check_environment(validate(tomllib.loads(block.replace("train.parquet", "train.jsonl"))))
    [script] = [block for block in blocks(COMING_FROM, "python") if "import penstock" in block]
    (tmp_path / "script.py").write_text(script)
    started: list[Config] = []

    def start(run: RunDir, **_: Any) -> None:
        started.append(load(run.config_path))
        run.write_ending("complete", "")

    monkeypatch.setattr("penstock.launch.python._start", start)
    runpy.run_path("script.py", run_name="__main__")
    assert [one.pipeline[0].model.kind for one in started] == ["hub"]


def test_the_site_is_built_without_warnings(tmp_path: Path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    assert all(f"<code>{key.path.rpartition('.')[2]}</code>" in reference for key in keys())


def test_the_test_of_the_guide_passes():
    written: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(ROOT / "docs" / "guides" / "own-environment.md", "python"):
        exec(block, written)
    written["test_two_letters_are_rewarded"]()


@pytest.mark.parametrize(
    ("page", "block", "name", "rollout"),
    [
        ("README.md", 0, "Shout", {}),
        ("docs/environments.md", 0, "Guess", {"max_turns": 3}),
        ("docs/environments.md", 1, "with_a_calculator", {"max_turns": 2}),
        ("docs/guides/own-environment.md", 0, "Double", {}),
    ],
)
def test_code_of_the_docs_is_accepted(tmp_path: Path, page: str, block: int, name: str, rollout: dict[str, Any]):
    module = f"docs_{name}"
    (tmp_path / f"{module}.py").write_text(blocks(ROOT / page, "python")[block])
    pipeline = {"name": "x", "steps": 1, "env": {"name": f"{module}:{name}"}, "model": {"kind": "tiny"}}
    config = validate({"run": {"extra_path": [str(tmp_path)]}, "pipeline": [pipeline | {"rollout": rollout}]})
    check_environment(config)
    environment = environment_of(config, config.pipeline[0])
    assert environment.prompt(3) == environment.prompt(3)
