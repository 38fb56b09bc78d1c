"""The dashboard's port: who may ask, what may be asked, and what comes back, over real HTTP."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from running import Running, letters, start, wait_for

from penstock.runtime.rundir import RunDir

HOSTILE = "</div><script>alert('x')</script>"


class Watched:
    """A `penstock dashboard` process, and a client that knows its address."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "dashboard", str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        found = re.search(r"dashboard: (http://\S+/)(\S+)/", self.process.stdout.readline())
        assert found is not None
        self.origin, self.token = found.groups()
        self.client = httpx.Client(base_url=f"{self.origin}{self.token}/", timeout=30.0, trust_env=False)
        wait_for(self._answers, 60, "the dashboard to answer")

    def _answers(self) -> bool:
        try:
            return self.client.get("").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, run: str, view: str, **query: str) -> dict:
        return self.client.get(f"api/runs/{run}/{view}", params=query).raise_for_status().json()

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small run as files alone, with text in it that a careless page would execute."""
    run = RunDir.create(
        tmp_path_factory.mktemp("dashboard") / "runs", "r", '[[pipeline]]\nname = "p"\nsteps = 3\n', "0.1.0"
    )
    line = {"kind": "step", "at": 1.0, "pipeline": "p", "step": 0, "reward": 0.5}
    run.metrics_path.write_bytes(orjson.dumps(line) + b"\n")
    samples = run.rollouts("p") / "samples.jsonl"
    samples.parent.mkdir()
    sample = {"step": 0, "prompt": 1, "sample": 7, "version": 0, "reward": 0.5, "advantage": 0.0, "length": 3}
    samples.write_bytes(orjson.dumps(sample | {"pieces": [{"by": "policy", "text": HOSTILE}]}) + b"\n")
    run.log_path("controller").write_text("a line\n")
    return run


@pytest.fixture(scope="module")
def watched(run: RunDir) -> Iterator[Watched]:
    watched = Watched(run.root.parent)
    yield watched
    watched.close()


def test_only_who_knows_the_address_gets_in(watched: Watched, run: RunDir):
    for path in ("", "static/app.js", "x" * 22, f"{watched.token}x/", f"/{watched.token[:-1]}/api/runs", "%00", "é/"):
        reply = httpx.get(watched.origin + path, trust_env=False)
        assert reply.status_code == 403, path
        assert run.root.name not in reply.text
        assert watched.token not in reply.text
    assert watched.client.get("api/runs").json()["runs"][0]["id"] == run.root.name


def test_requests_cannot_reach_other_files(watched: Watched, run: RunDir):
    secret = run.token()
    runs = run.root.name
    paths = [
        "static/../../../run_reader.py",
        "static/..%2f..%2fpage.py",
        "static/index.html",
        "static/%2e%2e/page.py",
        "api/runs/..%2f..%2fetc/overview",
        "api/runs/%2e%2e/overview",
        f"api/runs/{runs}%2f..%2f{runs}/overview",
        f"api/runs/{runs}/log?process=../token",
        f"api/runs/{runs}/log?process=..%2ftoken",
        f"api/runs/{runs}/samples?source=../../token",
        f"api/runs/{runs}/sample?source=p/../../token&sample=7",
        f"api/runs/{runs}/story?pipeline=p&kind=__class__&number=1",
        f"api/runs/{runs}/story?pipeline=p&kind=sample&number={'9' * 5000}",
        f"api/runs/{runs}/__init__",
        "api/compare?run=..%2f..",
    ]
    for path in paths:
        reply = watched.client.get(path)
        assert reply.status_code in (400, 403, 404), f"{path}: {reply.status_code} {reply.text[:200]}"
        assert secret not in reply.text
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert watched.client.request(method, "api/runs", content=b"x" * 1000).status_code == 405
    assert watched.client.get("").status_code == 200


def test_the_page_forbids_what_it_does_not_need(watched: Watched, run: RunDir):
    reply = watched.client.get("")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-store"
    for script in re.findall(r'src="(static/[^"]+)"', reply.text):
        assert watched.client.get(script).headers["content-type"].startswith("text/javascript")


def test_untrusted_text_travels_as_data_only(watched: Watched, run: RunDir):
    assert HOSTILE not in watched.client.get("").text
    reply = watched.client.get(f"api/runs/{run.root.name}/sample", params={"source": "p/samples", "sample": "7"})
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.json()["sample"]["pieces"][0]["text"] == HOSTILE


def test_a_run_that_cannot_be_read_is_named_in_the_comparison(watched: Watched, run: RunDir):
    damaged = RunDir.create(run.root.parent, "damaged", "", "0.1.0")
    damaged.metrics_path.mkdir()
    answer = watched.client.get("api/compare", params={"run": damaged.root.name})
    shutil.rmtree(damaged.root)
    assert answer.status_code == 404
    assert str(damaged.metrics_path) in answer.json()["error"]


def test_runs_are_compared_side_by_side(watched: Watched, run: RunDir):
    answer = watched.client.get("api/compare", params={"run": run.root.name}).json()
    assert answer["runs"][run.root.name]["pipelines"]["p"]["smooth"] == {"x": [0.0], "y": [0.5]}
    assert answer["metrics"][0] == "reward"
    assert answer["differences"] == []
    other = {"run": run.root.name, "metric": "no such metric"}
    compared = watched.client.get("api/compare", params=other).json()["runs"]
    assert compared[run.root.name]["pipelines"]["p"]["smooth"] == {"x": [], "y": []}


def overview(watched: Watched, run: Running) -> dict:
    return watched.ask(run.directory.name, "overview")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_run_is_watched_killed_resumed_and_finished(folder: Path):
    run = start(folder, letters(folder, steps=20_000, run="grace_s = 5.0"))
    run.wait_for_step(2)
    watched = Watched(folder / "runs")
    try:
        wait_for(lambda: overview(watched, run)["state"]["word"] == "running", 60, "the dashboard to see it run")
        first = overview(watched, run)["pipelines"][0]["step"]
        wait_for(lambda: overview(watched, run)["pipelines"][0]["step"] > first, 90, "the dashboard to follow")
        seen = wait_for(
            lambda: (found := watched.ask(run.directory.name, "loops"))["processes"] and found, 60, "gauges"
        )
        assert "controller" in {one["name"] for one in seen["processes"]}
        flow = watched.ask(run.directory.name, "flow", pipeline="letters")
        assert {"generate", "buffer", "train"} <= {stage["key"] for stage in flow["stages"]}
        story = watched.ask(run.directory.name, "story", pipeline="letters", kind="step", number="0")
        assert any("trained by letters.trainer" in line for line in story["lines"])

        run.process.send_signal(signal.SIGKILL)
        run.process.wait(30)
        state = wait_for(
            lambda: (s := overview(watched, run)["state"])["word"] != "running" and s, 60, "it to be seen dead"
        )
        assert state["word"] == "killed"
        assert f"penstock run --resume {run.directory}" in state["sentence"]

        steps = overview(watched, run)["pipelines"][0]["step"]
        again = start(folder, "--resume", run.directory, "--set", f"pipeline.letters.steps={steps + 3}")
        assert again.end()[0] == 0
        found = wait_for(
            lambda: (o := overview(watched, run))["state"]["word"] == "complete" and o, 60, "it to be complete"
        )
        assert found["pipelines"][0]["step"] == found["pipelines"][0]["steps"] == steps + 3
        assert found["journal_trouble"] == ""
        assert watched.ask(run.directory.name, "pool")["stays"]
    finally:
        watched.close()
        run.end()


@pytest.mark.slow
def test_a_failed_run_shows_its_sentence(folder: Path):
    config = letters(folder, steps=5, run="max_restarts = 0")
    run = start(folder, config)
    run.child("letters.trainer").kill()
    code, output = run.end()
    assert code == 1, output
    watched = Watched(run.directory)
    try:
        state = overview(watched, run)["state"]
    finally:
        watched.close()
    assert (state["word"], state["tone"]) == ("failed", "bad")
    assert state["sentence"].removesuffix(".") in output.replace("\n", " ")
