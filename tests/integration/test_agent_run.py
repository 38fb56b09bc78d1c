"""Agents that are programs: trained as they are, and a worker that is killed in the middle of their episodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import APIConnectionError, OpenAI
from running import TINY, start, step_lines, trained_prompts, wait_for

from penstock.journal.reader import history

PROMPTS = 6

AGENT = """
import json, os, pathlib, time, urllib.request

folder = pathlib.Path({folder!r})
position = os.environ["PENSTOCK_POSITION"]


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(dict(model="policy", messages=messages)).encode(),
        dict(Authorization="Bearer " + os.environ["OPENAI_API_KEY"]),
    )
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]


first = ask([dict(role="user", content="ab>")])
witness = folder / f"open-{{position}}-{{os.getpid()}}.tmp"
witness.write_text(json.dumps([os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]))
witness.rename(witness.with_suffix(".json"))
while not (folder / "go").exists():
    time.sleep(0.02)
second = ask([dict(role="user", content="ab>"), first, dict(role="user", content="?")])
print("turns:", 2)
print(float(second["content"].startswith("a")))
"""


@pytest.mark.timeout(300)
def test_a_worker_killed_in_the_middle_of_episodes_costs_no_prompt(folder: Path) -> None:
    (folder / "agent.py").write_text(AGENT.format(folder=str(folder)))
    path = folder / "run.toml"
    head = f"""
[run]
name = "agent"
dir = "{folder}/runs"
[[pipeline]]
name = "agent"
steps = 100
epochs = 1
[pipeline.env]
name = "agent"
options = {{ command = ["{sys.executable}", "{folder}/agent.py"], count = {PROMPTS}, alphabet = "abc>?" }}
"""
    tiny = TINY.replace("groups_per_step = 4", "groups_per_step = 2").replace("group_size = 4", "group_size = 2")
    path.write_text(head + tiny)
    run = start(folder, path)
    opened = wait_for(lambda: [*folder.glob("open-*.json")], 120, "an episode that is open")
    base_url, key = json.loads(opened[0].read_text())
    client = OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=30.0)
    assert client.models.list().data[0].id == "policy"

    run.child("agent.rollout.0").send_signal(signal.SIGKILL)
    with pytest.raises(APIConnectionError, match=r"Connection error"):
        wait_for(lambda: not client.completions.create(model="policy", prompt="a>"), 30)
    client.close()
    assert not step_lines(run.directory), "nothing was trained before the worker was killed"

    (folder / "go").touch()
    code, output = run.end(240)
    assert code == 0, output + run.logs()
    counts = trained_prompts(run.directory)
    assert (sorted(counts), {*counts.values()}) == ([*range(PROMPTS)], {1})
    assert "SIGKILL" in output
    # Two completions each, with the reply of the program between them: more than one may have.
    assert max(step["completion_length_mean"] for step in step_lines(run.directory)) > 2.0


HANGS = """
import json, os, time, urllib.request


def play(base_url, api_key, position):
    head = {{"Authorization": "Bearer " + api_key}}
    body = json.dumps({{"prompt": "ab>"}}).encode()
    urllib.request.urlopen(urllib.request.Request(base_url + "/completions", body, head), timeout=60).read()
    with open({path!r}, "ab", buffering=0) as calls:
        calls.write(b".")
        number = calls.tell()
    if number % 20 == 5:
        time.sleep(600)
    return float(number % 2)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_that_hangs_now_and_then_is_named_and_its_run_continues(folder: Path) -> None:
    (folder / "hanging.py").write_text(HANGS.format(path=str(folder / "calls")))
    path = folder / "run.toml"
    head = f"""
[run]
name = "agent"
dir = "{folder}/runs"
extra_path = ["{folder}"]
[[pipeline]]
name = "agent"
steps = 4
[pipeline.env]
name = "agent"
reward_concurrency = 2
options = {{ function = "hanging:play", alphabet = "abc>?", timeout_s = 3.0 }}
"""
    path.write_text(head + TINY.replace("groups_per_step = 4", "groups_per_step = 2"))
    run = start(folder, path)
    stands = r"in \"agent 'hanging:play' running for \d+ s, at hanging.py:13 play"
    wait_for(lambda: re.search(stands, doctor(run.directory)), 90, "the doctor names the agent and its line")
    code, output = run.end(240)
    assert code == 0, output + run.logs()
    hung = (len((folder / "calls").read_bytes()) + 15) // 20
    reason = b"agent 'hanging:play', position "
    told = [entry.body for entry in history(run.directory / "journal.sqlite") if reason in entry.body]
    assert hung >= 2
    assert sum(body.count(reason) for body in told) >= hung - 1, "the run may end before the last is late"


def doctor(directory: Path) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", "doctor", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
