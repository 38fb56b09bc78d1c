"""Adapters of a vLLM server: one name per version, and none is unloaded while a completion uses it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch

from penstock.engines.models import TinyLanguageModel, adapt, build
from penstock.engines.settings import LoraSection
from penstock.engines.vllm.adapters import VllmAdapters, export_base, rank_of
from penstock.engines.vllm.requests import completion_of
from penstock.records.ids import Version
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import Publisher

pytest.importorskip("peft")


class Server:
    """Answers as a server does; remembers the adapters it has."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in ("base", *self.adapters)]})
        body = json.loads(request.content)
        if request.url.path == "/v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter_config.json").exists()
            self.adapters[body["lora_name"]] = body["lora_path"]
        else:
            del self.adapters[body["lora_name"]]
        return httpx.Response(200, text="Success")


@pytest.fixture
def policy() -> Any:
    policy: Any = build(TinyLanguageModel(alphabet="ab", hidden_size=16, layers=1, heads=2))
    return adapt(policy, LoraSection(rank=4))


@pytest.fixture
def engine(policy: Any, tmp_path: Path) -> Iterator[tuple[VllmAdapters, Server]]:
    server = Server()
    adapters = VllmAdapters("no socket", tmp_path, tmp_path / "adapters", policy)
    adapters._client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://vllm")
    yield adapters, server
    adapters.close()


def publish(engine: VllmAdapters, policy: Any, directory: Path, version: int) -> str:
    tensors = {name: tensor + version for name, tensor in policy.named_tensors().items()}
    manifest = Publisher(directory, "l").publish(Version(version), tensors)
    engine.stage(engine.fetch(manifest, 1.0))
    assert digest_of(engine.staged_tensors()) == manifest.digest, "what the server reads is what was published"
    assert engine.swap(version, manifest.digest, 1.0) == 0.0
    assert engine.served_digest() == manifest.digest
    return manifest.digest


def test_every_version_has_a_name_and_completions_keep_theirs(
    engine: tuple[VllmAdapters, Server], policy: Any, tmp_path: Path
) -> None:
    adapters, server = engine
    first = publish(adapters, policy, tmp_path, 0)
    with adapters.in_use() as (name, version, digest):
        assert (name in server.adapters, version, digest) == (True, 0, first)
        publish(adapters, policy, tmp_path, 1)
        assert len(server.adapters) == 2, "a completion in flight keeps the adapter it began with"
        publish(adapters, policy, tmp_path, 2)
        assert sorted(one.partition("-")[0] for one in server.adapters) == ["v0", "v2"]
    publish(adapters, policy, tmp_path, 3)
    assert [one.partition("-")[0] for one in server.adapters] == ["v3"]
    assert [one.name for one in (tmp_path / "adapters").iterdir()] == [*server.adapters], "nor are files left behind"


def test_the_server_reads_the_base_model_without_the_adapter(policy: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(export_base(policy, tmp_path / "base"))
    expected = policy.module.get_base_model().state_dict()
    for name, tensor in loaded.named_parameters():
        stem, _, last = name.rpartition(".")
        assert tensor.equal(expected[name] if name in expected else expected[f"{stem}.base_layer.{last}"])
    assert rank_of(policy) == 8, "the least that the server's flag may be"


def test_workers_export_the_base_model_at_the_same_time(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, save = threading.Barrier(2), safetensors.torch.save_file

    def at_once(*given: Any, **named: Any) -> None:
        both.wait(60)
        save(*given, **named)
        both.wait(60)

    monkeypatch.setattr(safetensors.torch, "save_file", at_once)
    with ThreadPoolExecutor(2) as workers:
        places = list(workers.map(lambda _: export_base(policy, tmp_path / "base"), range(2)))
    assert places == [tmp_path / "base"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["base"], "nothing else is left"
    assert {path.name for path in places[0].iterdir()} == {"config.json", "model.safetensors"}


def test_tokens_are_of_the_adapter_that_drew_them() -> None:
    drawn = {
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "weight_versions": [{"version": "default", "start": 0, "end": 2}],
    }
    logprobs = {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]}
    body = json.dumps({"choices": [drawn | {"logprobs": logprobs}]}).encode()
    made = completion_of(body, (9, "later"), adapter=(7, "digest"))
    assert (made.version, made.digest, made.versions.tolist()) == (7, "digest", [[0, 7]])
