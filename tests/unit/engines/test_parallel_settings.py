"""Engines over several devices: what is told to the server, what follows for calls, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import load
from penstock.engines.vllm.server import ServerSettings, command
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
        ("torch", ["pipeline.p.lora.rank=4"], "an engine with adapters: .* without tensor_parallel"),
        ("torch", ["pool.devices=4"], "cannot share a pool"),
        ("vllm", ["pool.devices=4"], "needs 2 devices of the pool, but rollout.devices_per_worker is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, kind: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, kind, "pipeline.p.engine.tensor_parallel=2", *overrides)
