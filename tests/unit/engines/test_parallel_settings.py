"""Engines over several devices: what is told to the server, what follows for calls, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import load
from penstock.engines.vllm.server import Room, ServerSettings, command
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.errors import ConfigError

RUN = """
[[pipeline]]
name = "p"
steps = 1
[pipeline.env]
name = "copy"
[pipeline.model]
kind = "tiny"
[pipeline.engine]
kind = "{kind}"
"""


def test_the_server_is_told_how_many_gpus_a_copy_has_and_how_many_copies_there_are() -> None:
    def settings(**engine: int) -> ServerSettings:
        section = VllmEngineSection(**engine)  # type: ignore[arg-type]
        return ServerSettings(Path("m"), Path("h"), Path("l"), section, "python", "float32", 2048, threads=1)

    flags = command(settings(tensor_parallel=2, data_parallel=4), 1)
    assert flags[flags.index("--tensor-parallel-size") + 1] == "2"
    assert flags[flags.index("--data-parallel-size") + 1] == "4"
    assert not any("parallel" in flag for flag in command(settings(), 1))


def metrics(decoding: int, waiting: int, preemptions: int, cache_used: float) -> str:
    """Of a server that decodes in two processes."""
    return f"""# HELP vllm:num_requests_running
vllm:num_requests_running{{engine="0",model_name="m"}} {decoding - 2}.0
vllm:num_requests_running{{engine="1",model_name="m"}} 2.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 9.0
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {cache_used}
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.125
"""


def test_a_servers_metrics_say_how_full_it_is() -> None:
    room = Room()
    for now in (10.0, 11.0):
        room.look(metrics(16, 7, 2, 0.25), now, 0.0)
    found = {"requests_decoding": 12.0, "requests_waiting": 9.0, "preemptions": 3.0, "cache_used": 0.9375}
    assert room.look(metrics(12, 9, 5, 0.9375), 12.0, 0.0) == found


def test_requests_that_a_pause_threw_out_are_not_too_many() -> None:
    """A sequence seen on a GPU, where 256 requests were decoded."""
    room = Room()
    room.look(metrics(256, 256, 0, 0.01), 10.0, 0.0)
    before = room.look(metrics(256, 256, 0, 0.01), 11.0, 0.0)
    assert before["requests_waiting"] == 256.0
    assert room.look(metrics(256, 256, 0, 0.01), 12.0, None) == {}  # paused
    assert room.look(metrics(256, 256, 0, 0.01), 13.0, 12.5) == {}  # the metrics are of before
    assert room.look(metrics(20, 492, 20, 0.001), 14.0, 12.5) == {}  # it reads them again
    assert room.look(metrics(256, 256, 256, 0.01), 15.0, 12.5) == {}
    assert room.look(metrics(256, 256, 256, 0.01), 16.0, 12.5) == before
    assert room.look(metrics(256, 256, 512, 0.01), 19.0, 17.5) == {}  # a whole pause between two looks
    assert room.look(metrics(256, 256, 512, 0.01), 20.0, 17.5) == before
    assert room.look(metrics(200, 312, 515, 0.99), 21.0, 17.5)["preemptions"] == 3.0


def config(folder: Path, kind: str, *overrides: str) -> Any:
    path = folder / "run.toml"
    path.write_text(RUN.format(kind=kind))
    return load(path, overrides)


def test_every_copy_of_the_model_is_kept_full(tmp_path: Path) -> None:
    one = config(tmp_path, "vllm").pipeline[0].rollout.concurrency
    assert config(tmp_path, "vllm", "pipeline.p.engine.data_parallel=3").pipeline[0].rollout.concurrency == 3 * one


@pytest.mark.parametrize(
    ("kind", "overrides", "said"),
    [
        ("torch", ["pipeline.p.rollout.ranks=2"], "cannot both be above 1"),
        ("torch", ["pipeline.p.lora.rank=4"], "loads adapters: .* not divided"),
        ("torch", ["pool.devices=4"], "cannot share a pool"),
        ("vllm", ["pool.devices=4"], "needs 2 devices of the pool, but rollout.devices_per_worker is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, kind: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, kind, "pipeline.p.engine.tensor_parallel=2", *overrides)
