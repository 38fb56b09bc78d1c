"""Versions of a vLLM server: where their files come from, and what tokens drawn with equal bytes are called."""

from pathlib import Path

import msgspec
import torch

from penstock.engines.vllm.requests import completion_of, label
from penstock.engines.vllm.weights import VllmEngine
from penstock.records.ids import Version
from penstock.weights.io.files import FileTransport, Publisher


def answer(*spans: tuple[str, int, int]) -> bytes:
    tokens = list(range(spans[-1][2]))
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    choice = {"finish_reason": "stop", "token_ids": tokens, "logprobs": {"content": content}}
    return msgspec.json.encode({"choices": [choice | {"weight_versions": versions}]})


def test_tokens_carry_the_version_that_their_weights_are_known_as(tmp_path: Path) -> None:
    engine = VllmEngine(str(tmp_path / "socket"), tmp_path, tmp_path / "versions")
    engine.version, engine.digest, engine._loaded = 3, "d3", 3
    for version in (4, 5):
        engine.relabel(version, 1.0)
    assert (engine.version, engine.digest) == (5, "d3")
    body = answer((label(2, "d2"), 0, 2), (label(3, "d3"), 2, 4))
    done = completion_of(body, (engine.version, engine.digest), engine.published_as)
    assert done.versions.tolist() == [[0, 2], [2, 5]]
    assert (done.version, done.digest) == (2, "d2")
    done = completion_of(answer((label(3, "d3"), 0, 3)), (5, "d3"), engine.published_as)
    assert (done.version, done.digest) == (5, "d3")
    engine.close()


def test_files_of_another_host_are_copied_to_this_one(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    tensors = {"b": torch.randn(3, 4), "a": torch.arange(5.0)}
    published = Publisher(there, "l1", bucket_bytes=40).publish(Version(3), tensors)
    engine = VllmEngine(str(tmp_path / "socket"), here, tmp_path / "versions")
    engine.elsewhere = FileTransport(there)
    fetched = engine.fetch(published, 1.0)
    assert {name: tensor.tolist() for name, tensor in fetched.items()} == {n: t.tolist() for n, t in tensors.items()}
    root, manifest = engine._fetched[published.digest]
    assert root == tmp_path / "versions"
    assert manifest.held == published.held
    engine.close()
