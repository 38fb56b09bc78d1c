"""What is said to a vLLM server, and how its answers are read."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.engines.requests import Sampling
from penstock.engines.vllm.requests import completion_of, label, sampling_params
from penstock.engines.vllm.server import ServerSettings, VllmServer, check_interpreter, command, environment
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.errors import ConfigError, RemoteProtocolError

OLD, NEW = "a" * 32, "b" * 32


def settings(folder: Path, *, accelerator: bool = False, **engine: Any) -> ServerSettings:
    return ServerSettings(
        model=folder / "model",
        home=folder,
        log=folder / "log",
        engine=VllmEngineSection(**engine),
        python="python",
        dtype="float32",
        max_length=2048,
        threads=1,
        accelerator=accelerator,
    )


def answer(tokens: list[int], spans: list[tuple[str, int, int]], finish: str = "stop", **more: Any) -> bytes:
    content = [{"token_id": token, "logprob": -0.5 * token, "rank": 1} for token in tokens]
    choice = {
        "finish_reason": finish,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": [{"version": said, "start": start, "end": end} for said, start, end in spans],
    }
    return json.dumps({"choices": [choice | more]}).encode()


def test_a_completion_carries_what_the_server_says_of_its_weights():
    body = answer([3, 4, 5], [(label(8, NEW), 0, 1), (label(7, OLD), 1, 3)])
    completion = completion_of(body, (9, "other"))
    assert completion.token_ids.tolist() == [3, 4, 5]
    assert completion.logprobs.tolist() == [-1.5, -2.0, -2.5]
    assert completion.versions.tolist() == [[0, 8], [1, 7]]
    assert (completion.version, completion.digest) == (7, OLD)  # the oldest of them
    assert completion.ending == "stop"


def test_an_aborted_completion_may_have_no_token_at_all():
    completion = completion_of(answer([], [], "abort", weight_versions=None), (9, NEW))
    assert completion.ending == "interrupted"
    assert completion.versions.shape == (0, 2)
    assert (completion.version, completion.digest) == (9, NEW)


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b'{"choices": []}',
        answer([1], [("default", 0, 1)]),  # drawn before anything was published
        answer([1], []),
        answer([1, 2], [(label(1, OLD), 0, 2)], logprobs={"content": [{"token_id": 1, "logprob": -1.0}]}),
        answer([1], [(label(1, OLD), 0, 1)], logprobs=None),
        answer([1], [(label(1, OLD), 0, 1)], finish="error"),
        answer([1], [(label(1, OLD), 0, 1)], logprobs={"content": [{"token_id": 1, "logprob": float("-inf")}]}),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(body: bytes):
    with pytest.raises(RemoteProtocolError):
        completion_of(body, (0, ""))


def test_only_the_given_token_ends_a_completion():
    said = sampling_params(Sampling(max_new_tokens=5, temperature=0.5, stop_ids=(2,), top_k=3, top_p=0.9, min_p=0.1))
    assert said["ignore_eos"] is True
    assert said["stop_token_ids"] == [2]
    assert (said["max_tokens"], said["temperature"], said["logprobs"]) == (5, 0.5, 0)
    assert (said["top_k"], said["top_p"], said["min_p"]) == (3, 0.9, 0.1)
    assert sampling_params(Sampling(1))["stop_token_ids"] == []


def test_greedy_is_asked_for_only_where_its_log_probabilities_are_right():
    assert sampling_params(Sampling(1, greedy=True))["temperature"] == 0.0
    with pytest.raises(ConfigError, match="temperature"):
        sampling_params(Sampling(1, greedy=True, temperature=0.5))


def test_a_server_begins_with_made_up_weights_and_keeps_the_flags_it_depends_on(tmp_path: Path):
    more = ["--gpu-memory-utilization", "0.5"]
    half = msgspec.structs.replace(settings(tmp_path, accelerator=True, eager=True, options=more), memory_share=0.4)
    flags = command(half, parent_pid=7)
    assert flags[flags.index("penstock.engines.vllm.main") + 1] == "7"
    assert flags[flags.index("--load-format") + 1] == "dummy"
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    memory = [at for at, flag in enumerate(flags) if flag == "--gpu-memory-utilization"]
    assert flags[memory[-1] + 1] == "0.5", "the last one counts, and this one is the user's to choose"
    assert memory[-1] < flags.index("--model")
    assert "--enforce-eager" in flags
    assert "--enable-sleep-mode" not in command(settings(tmp_path), 7)
    assert "--enable-sleep-mode" in command(settings(tmp_path, accelerator=True), 7)
    assert "TORCHDYNAMO_DISABLE" not in environment(settings(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        ["--logprobs-mode", "raw_logprobs"],
        ["--logprobs-mode=raw_logprobs"],
        ["--logprobs_mode", "raw_logprobs"],
        ["--logprobs-m", "raw_logprobs"],
        ["--max-logprobs", "5", "--load-format", "auto"],
        ["--weight-transfer-config.backend", "nccl"],
        ["--weight-transfer-config.backend=nccl"],
        ["--no-skip-tokenizer-init"],
        ["--no-enable-sleep-mode"],
        ["--config", "flags.yaml"],
        ["--model=other"],
        ["--dtype", "bfloat16"],
        ["-tp", "2"],
        ["-tp=2"],
        ["-dp2"],
        ["-q", "fp8"],
        ["--override-generation-config", "{}"],
        ["--seed", "1"],
        ["--uds", "elsewhere"],
        ["--port", "80"],
    ],
)
def test_a_flag_that_samples_depend_on_is_refused(options: list[str]):
    with pytest.raises(ValueError, match=r"engine.options: .* belongs to Penstock"):
        VllmEngineSection(options=options)


def test_every_flag_that_is_set_is_refused_but_those_before_the_users(tmp_path: Path):
    """A flag added to the command cannot be forgotten in the list."""
    everything = settings(tmp_path, accelerator=True, eager=True, tensor_parallel=2, data_parallel=2, options=["-O3"])
    for lora_rank in (0, 8):
        given = command(msgspec.structs.replace(everything, memory_share=0.5, lora_rank=lora_rank), 7)
        for flag in (one for one in given[given.index("-O3") :] if one.startswith("--")):
            with pytest.raises(ValueError, match="belongs to Penstock"):
                VllmEngineSection(options=[flag])


def test_other_flags_are_the_users():
    allowed = ["--no-disable-uvicorn-access-log", "-O3"]
    allowed += ["--gpu-memory-utilization", "0.5", "--max-num-batched-tokens=4096", "--kv-cache-dtype", "fp8"]
    assert VllmEngineSection(options=allowed).options == allowed


def test_the_socket_can_be_reached_however_deep_the_run_lies(tmp_path: Path):
    deep = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 6)
    deep.mkdir(parents=True)
    server = VllmServer(settings(deep))
    address = server.address()
    assert len(address) < 100
    Path(address).write_text("here")
    assert (deep / "socket").read_text() == "here"
    server.close(1.0)
    assert not os.path.exists(address)


@pytest.mark.skipif(sys.platform != "linux", reason="interpreters of other systems differ")
def test_an_interpreter_without_vllm_is_a_mistake_in_the_configuration(tmp_path: Path):
    python = tmp_path / "python"
    for said, complaint in [
        ('{"vllm": false, "penstock": null}', "vLLM cannot be imported"),
        ('{"vllm": true, "penstock": null}', "has no package penstock"),
        ('{"vllm": true, "penstock": "/there", "build": "b"}', "another package penstock than this one, in /there"),
        ("nonsense", "cannot be probed"),
    ]:
        python.write_text(f"#!/bin/sh\necho '{said}'\n")
        python.chmod(stat.S_IRWXU)
        with pytest.raises(ConfigError, match=complaint):
            check_interpreter(str(python))
    with pytest.raises(ConfigError, match="cannot be probed"):
        check_interpreter(str(tmp_path / "absent"))


@pytest.mark.skipif(sys.platform != "linux", reason="interpreters of other systems differ")
def test_another_package_of_this_name_and_version_is_refused(tmp_path: Path):
    """`pip install penstock` gives another project's, of the version that this one has too."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(stat.S_IRWXU)
    check_interpreter(str(python))
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").write_text(f"__version__ = {penstock.__version__!r}")
    with pytest.raises(ConfigError, match=r"another package penstock than this one.*penstock-rl"):
        check_interpreter(str(python))
