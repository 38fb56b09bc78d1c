"""Runs episodes of a verifiers environment, in the interpreter that has verifiers. Does not import Penstock.

Started by `penstock.envs.io.verifiers` with one argument, a JSON object of `id` and `config`. Messages are lines of
JSON on the standard streams:

    out  {"rows": 12, "agents": ["agent"]}                          once, when the environment is loaded
    in   {"number": 1, "base_url": …, "api_key": …, "row": 3, "agents": ["agent"], "timeout_s": 600}
    out  {"number": 1, "reward": 0.5, "parts": {…}, "session": …}   or {"number": 1, "error": …}

It ends when its input ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

MODEL = "policy"
UNSUPPORTED = "unsupported_content"
"""The endpoint's code for an image and the like. An episode that sends one fails, even if it would have a reward."""
KEPT_TASKS = 4096
"""Tasks of an endless taskset that are kept; for an older one the taskset is read again from its beginning."""


class Bridge:
    """One environment, with the tasks read so far."""

    def __init__(self, ident: str, config: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # type: ignore[import-not-found]

        self.env: Any = load_environment(resolve_env_config(_with_defaults(ident, config)))
        self.tasks: OrderedDict[int, Any] = OrderedDict()
        self.coming: Iterator[tuple[int, Any]] = iter(())
        self.rows: int | None = None
        if self.env.taskset.bounded:
            self.tasks.update(enumerate(self.env.taskset))
            self.rows = len(self.tasks)
        for number, task in self.tasks.items() if self.rows is not None else [(0, self.task(0))]:
            if kinds := _not_text(task.data.prompt):
                raise ValueError(f"task {number} has a prompt with {kinds}: the policy reads text only")

    async def agents(self) -> list[str]:
        """The agents that use the trained model, without those that the environment does not train."""
        from verifiers.v1.agent import Agents  # type: ignore[import-not-found]
        from verifiers.v1.configs.agent import agent_config_fields  # type: ignore[import-not-found]

        placeholder: Any = lambda name, config: SimpleNamespace(trainable=True)  # noqa: E731 - typed as verifiers has it
        agents: Any = Agents(self.env.config, placeholder)
        await self.env.setup(agents)
        fields = agent_config_fields(self.env.config).items()
        return [
            name
            for name, config in fields
            if config.model is None and config.client is None and getattr(agents, name).trainable
        ]

    def task(self, row: int) -> Any:
        if row in self.tasks or self.rows is not None:
            return self.tasks[row]
        found = next(self.coming, None)
        if found is None or found[0] > row:
            self.coming = iter(enumerate(self.env.taskset))
            found = next(self.coming)
        for number, task in itertools.chain([found], self.coming):
            self.tasks[number] = task
            if len(self.tasks) > KEPT_TASKS:
                self.tasks.popitem(last=False)
            if number == row:
                break
        return self.tasks[row]

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """One episode: the reward of the first of the agents that made a call, and the session of its calls."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # type: ignore[import-not-found]

        variable = f"PENSTOCK_EPISODE_{request['number']}"  # a client reads its key from the environment
        os.environ[variable] = request["api_key"]
        try:
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            [slot] = self.env.slots(self.task(request["row"]))
            async with asyncio.timeout(request["timeout_s"]):
                episode = await self.env.run_slot(slot, ModelContext(model=MODEL, client=client))
        finally:
            del os.environ[variable]
        for call in (call for trace in episode.traces for call in trace.calls):
            if call.error is not None and UNSUPPORTED in call.error.message:
                raise RuntimeError(call.error.message)
        active = [trace for trace in episode.traces if trace.num_turns and trace.agent.name in request["agents"]]
        if not active:
            refused = [call.error for trace in episode.traces for call in trace.calls if call.error is not None]
            errors = [*refused, *episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(_why(errors) or f"none of {', '.join(request['agents'])} requested a completion")
        trace = min(active, key=lambda trace: request["agents"].index(trace.agent.name))
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        if not rewards and not trace.ok:  # an environment may reward an agent that failed: keep its reward
            raise RuntimeError(_why([*trace.errors, *episode.errors]) or f"no reward: {trace.stop_condition}")
        measured = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": trace.reward, "parts": measured | rewards, "session": trace.id}


def _with_defaults(ident: str, config: dict[str, Any]) -> dict[str, Any]:
    """Adds defaults: agents run as subprocesses on this machine, and only chat and call tools."""
    from verifiers.v1.configs.agent import AgentConfig  # type: ignore[import-not-found]
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type  # type: ignore[import-not-found]

    env_id, _, taskset_id = ident.rpartition("+")
    raw: dict[str, Any] = {}
    for name, value in config.items():  # dots separate nested tables
        *tables, last = name.split(".")
        place = raw
        for table in tables:
            place = place.setdefault(table, {})
        place[last] = value
    raw["taskset"] = {**raw.get("taskset", {}), "id": taskset_id}
    if env_id:
        raw["id"] = env_id
    for name, field in env_config_type(taskset_id, env_id).model_fields.items():
        if isinstance(field.default, AgentConfig):
            agent = raw.setdefault(name, {})
            if "runtime" not in field.default.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if field.default.harness is None and default_harness_id(taskset_id) == "bash":
                agent.setdefault("harness", {"id": "null"})
    return raw


def _not_text(prompt: Any) -> str:
    """The kinds of content in a prompt that are no text."""
    contents = [message.content for message in prompt] if isinstance(prompt, list) else []
    parts = itertools.chain.from_iterable(content for content in contents if isinstance(content, list))
    return ", ".join(dict.fromkeys(repr(part.type) for part in parts if part.type != "text"))


def _why(errors: list[Any]) -> str:
    return f"{errors[-1].type}: {errors[-1].message}" if errors else ""


async def serve(bridge: Bridge, out: Any) -> None:
    """Serves requests until the input ends; then cancels the running episodes."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    playing: set[asyncio.Task[None]] = set()

    def send(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    async def answer(request: dict[str, Any]) -> None:
        try:
            send(number=request["number"], **await bridge.play(request))
        except Exception as error:  # noqa: BLE001 - only this episode fails
            cause = "" if isinstance(error, RuntimeError) else traceback.format_exc()
            send(number=request["number"], error=f"{type(error).__name__}: {error}\n{cause}".strip())

    async with bridge.env.serving():
        send(rows=bridge.rows, agents=await bridge.agents())
        async with asyncio.TaskGroup() as group:
            while line := await reader.readline():
                task = group.create_task(answer(json.loads(line)))
                playing.add(task)
                task.add_done_callback(playing.discard)
            for task in playing:
                task.cancel()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the environment must not mix with responses
    settings = json.loads(sys.argv[1])
    # verifiers starts its programs with uv, which may be installed beside it.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    try:
        bridge = Bridge(settings["id"], settings["config"])
    except Exception as error:  # reported to the parent process
        out.write(json.dumps({"failure": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        raise SystemExit(1) from error
    asyncio.run(serve(bridge, out))


if __name__ == "__main__":
    main()
