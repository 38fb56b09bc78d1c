"""Environments of the package verifiers, written as its documentation says: loaded, played, and trained."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import TINY, start, step_lines, wait_for

from penstock.envs.io.verifiers import Verifiers
from penstock.errors import ConfigError

PYTHON = os.environ.get("PENSTOCK_VERIFIERS_PYTHON") or (importlib.util.find_spec("verifiers") and sys.executable)
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs verifiers: installed here, or PENSTOCK_VERIFIERS_PYTHON names an interpreter that has it"
)

PACKAGE = '''
"""Two agents are told a letter and repeat it; who does not is asked once more."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class LetterData(vf.TaskData):
    answer: str


class LetterTask(vf.Task[LetterData]):
    @vf.reward(weight=2.0)
    async def repeated(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LettersConfig(vf.TasksetConfig):
    letters: str = "abcdefgh"


class LettersTaskset(vf.Taskset[LetterTask, LettersConfig]):
    def load(self):
        for number, letter in enumerate(self.config.letters):
            yield LetterTask(LetterData(idx=number, prompt=f"{letter}>", answer=letter), self.config.task)


class Talk(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def setup(self, runtime) -> None: ...

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60.0, headers={"Authorization": f"Bearer {secret}"}) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.is_error:
                    break  # as environments do that count it as a lost game
                said = answer.json()["choices"][0]["message"]["content"]
                if said.strip() == data.answer:
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")


class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def setup(self, agents) -> None:
        agents.judge.trainable = False

    async def run(self, task, agents) -> None:
        await agents.first.run(task)
        await agents.second.run(task)


__all__ = ["LettersTaskset", "PairEnv", "Talk"]
'''


PICTURES = '''
"""A picture, in the prompt or after the first answer; whoever does not name its colour has no reward."""

import itertools

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class PicturesConfig(vf.TasksetConfig):
    later: bool = False


class PictureTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def named(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "red")


class PicturesTaskset(vf.Taskset[PictureTask, PicturesConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            shown = "Begin." if self.config.later else [vf.UserMessage(content=[PICTURE])]
            yield PictureTask(vf.TaskData(idx=number, prompt=shown), self.config.task)


class Show(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def setup(self, runtime) -> None: ...

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60.0, headers={"Authorization": f"Bearer {secret}"}) as client:
            for picture in (None, PICTURE):
                content = [picture] if picture else data.prompt
                body = {"model": ctx.model, "messages": [{"role": "user", "content": content}]}
                await client.post(f"{endpoint}/chat/completions", json=body)
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["PicturesTaskset", "Show"]
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "letters_env").mkdir()
    (folder / "letters_env" / "__init__.py").write_text(PACKAGE)
    (folder / "pictures_env").mkdir()
    (folder / "pictures_env" / "__init__.py").write_text(PICTURES)
    return folder


@contextmanager
def model(said: str, status: int = 200) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server that always says the same and refuses pictures; what it was asked, with the session of each request."""
    asked: list[tuple[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["X-Session-ID"], body["messages"]))
            message = {"role": "assistant", "content": said}
            answer = {
                "id": "c",
                "created": 0,
                "model": "policy",
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            pictured = "image_url" in json.dumps(body)
            error = (
                {"message": "it is of type 'image_url'", "code": "unsupported_content"}
                if pictured
                else {"message": said}
            )
            found = 400 if pictured else status
            data = json.dumps(answer if found == 200 else {"error": error}).encode()
            self.send_response(found)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
        finally:
            server.shutdown()


@pytest.mark.slow
def test_an_environment_is_played_by_position_and_one_agent_of_it_is_the_sample(path: Path) -> None:
    environment = Verifiers(id="letters_env", python=str(PYTHON), path=[str(path)], shuffle=False)
    assert environment.agents == ["first", "second"]
    assert (environment.count, environment.rows) == (None, 16)
    with model("b") as (base_url, asked):
        second = environment.play(base_url, "key", 3)  # the second agent of the second task
        first = environment.play(base_url, "key", 0)
    assert (second.reward, second.parts) == (2.0, {"repeated": 1.0, "turns": 1.0})
    assert (first.reward, first.parts) == (0.0, {"repeated": 0.0, "turns": 2.0})
    assert [session for session, _ in asked].index(second.session) == 1
    assert [messages for session, messages in asked if session == first.session][1][-1]["content"] == "?"

    with model("the context is too long", 400) as (base_url, _), pytest.raises(RuntimeError, match="is too long"):
        environment.play(base_url, "key", 0)

    held_out = environment.hold_out(4)
    assert (environment.rows, held_out.rows) == (12, 4)
    with model("g") as (base_url, _):
        assert held_out.play(base_url, "key", 0).reward == 2.0

    # The process is killed in the middle of an episode: that fails, and the next one has another process.
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    [process] = [one for one in alive if "verifiers_bridge.py" in " ".join(one.cmdline())]
    with model("b") as (base_url, asked):
        killer = threading.Thread(target=lambda: (wait_for(lambda: asked, 60), process.kill()))
        killer.start()
        with pytest.raises(RuntimeError, match="killed by SIGKILL"):
            _play_for_ever(environment, base_url)
        killer.join()
        assert environment.play(base_url, "key", 2).reward == 2.0


@pytest.mark.slow
def test_an_environment_with_pictures_is_refused(path: Path) -> None:
    options: dict[str, Any] = {"id": "pictures_env", "python": str(PYTHON), "path": [str(path)]}
    with pytest.raises(ConfigError, match="task 0 has a prompt with 'image_url': the policy reads text only"):
        Verifiers(**options)
    environment = Verifiers(**options, config={"taskset": {"later": True}})
    with model("red") as (base_url, asked), pytest.raises(RuntimeError, match="unsupported_content"):
        environment.play(base_url, "key", 0)
    assert len(asked) == 2, "it had an answer and a reward"


def _play_for_ever(environment: Verifiers, base_url: str) -> None:
    while True:
        environment.play(base_url, "key", 0)


@pytest.mark.slow
def test_what_cannot_be_loaded_is_a_configuration_error(path: Path) -> None:
    for options, sentence in (
        ({"id": "no_such_env"}, "no_such_env"),
        ({"id": "letters_env", "agents": ["judge"]}, "it has first, second"),
        ({"id": "letters_env", "python": "/no/python"}, "cannot be started"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Verifiers(**{"python": str(PYTHON), "path": [str(path)], **options})


@pytest.mark.timeout(300)
def test_two_agents_in_two_turns_are_trained(folder: Path, path: Path) -> None:
    config = folder / "run.toml"
    head = f'''
[run]
name = "verifiers"
dir = "{folder}/runs"
[[pipeline]]
name = "letters"
steps = 3
[pipeline.env]
name = "verifiers:letters_env"
[pipeline.env.options]
python = "{PYTHON}"
path = ["{path}"]
alphabet = "abcdefgh>?"
config = {{ taskset = {{ letters = "abcd" }} }}
'''
    config.write_text(head + TINY.replace("max_new_tokens = 4", "max_new_tokens = 2"))
    run = start(folder, config)
    code, output = run.end(240)
    assert code == 0, output + run.logs()
    assert "failed" not in output
    for step in step_lines(run.directory):
        assert 1.0 <= step["reward/turns/mean"] <= 2.0
        assert step["reward"] == pytest.approx(2.0 * step["reward/repeated/mean"])
