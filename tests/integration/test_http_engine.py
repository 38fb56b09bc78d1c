"""A server that the user runs, asked for completions: Penstock's own endpoint, and servers that answer otherwise."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.load import validate
from penstock.engines.http.engine import HttpEngine
from penstock.engines.http.settings import HttpEngineSection
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Sampling
from penstock.engines.tokenizer import CharacterTokenizer
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import ConfigError, PeerLost, RunFailed
from penstock.roles.offline import evaluate, replaced, saved, served_by
from penstock.rollout.io.endpoint import Endpoint

ALPHABET = "abcd>"
TOKENIZER = CharacterTokenizer(ALPHABET)
DRAW = Sampling(max_new_tokens=4, stop_ids=TOKENIZER.stop_ids, greedy=True)


def by_letter(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """Another reward for every other completion, so that equal measurements mean equal completions."""
    return [sum((at + 1) * ord(letter) for at, letter in enumerate(said)) / 1000 for said in completions]


Answer = Callable[[dict[str, Any]], tuple[int, Mapping[str, Any]]]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that it was sent, with the header of the key."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body | {"path": self.path, "key": self.headers.get("authorization")})
            status, content = answer(body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}", asked
        finally:
            listening.shutdown()
            thread.join()


def choice(text: str, reason: str = "length", **more: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]}


async def ask(url: str, sampling: Sampling = DRAW, **keys: Any) -> Any:
    engine = HttpEngine(HttpEngineSection(url=url, model_name="m", **keys), TOKENIZER, key="secret")
    try:
        return await engine.complete(TOKENIZER.encode("ab>"), sampling)
    finally:
        await engine.close()


async def test_token_ids_of_the_server_are_kept_and_nothing_is_claimed_of_weights() -> None:
    ids = [*TOKENIZER.encode("ab"), TOKENIZER.eos_id]
    with server(lambda body: choice("not these", "stop", token_ids=ids)) as (url, asked):
        drawn = await ask(url)
    assert drawn.token_ids.tolist() == ids
    assert (drawn.ending, drawn.version, drawn.digest) == ("stop", 0, "")
    assert np.isnan(drawn.logprobs).all()
    [sent] = asked
    assert (sent["path"], sent["key"]) == ("/v1/completions", "Bearer secret")
    assert sent["prompt"] == TOKENIZER.encode("ab>")
    assert (sent["temperature"], sent["max_tokens"], sent["return_token_ids"]) == (0.0, 4, True)
    assert sent["stop_token_ids"] == [TOKENIZER.eos_id]
    assert not {"top_k", "top_p", "min_p"} & sent.keys()


async def test_text_is_tokenised_where_the_server_gives_no_ids() -> None:
    with server(lambda body: choice("abca")) as (url, _):
        drawn = await ask(url)
    assert (TOKENIZER.decode(drawn.token_ids), drawn.ending) == ("abca", "length")


async def test_a_server_that_ignores_stop_tokens_is_cut_at_the_first() -> None:
    ids = [*TOKENIZER.encode("a"), TOKENIZER.eos_id, *TOKENIZER.encode("bc")]
    with server(lambda body: choice("abc", token_ids=ids)) as (url, _):
        drawn = await ask(url)
    assert (drawn.token_ids.tolist(), drawn.ending) == (ids[:2], "stop")


async def test_a_busy_server_is_asked_again() -> None:
    answers = iter([(429, {}), (503, {}), choice("ab")])
    with server(lambda body: next(answers)) as (url, asked):
        assert len((await ask(url)).token_ids) == 2
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((401, {"error": "no such key"}), RunFailed, "no such key"),
        ((200, {"choices": []}), RunFailed, "not an OpenAI completion"),
        (choice("ab", "content_filter"), RunFailed, "not an OpenAI completion"),
        ((503, {}), PeerLost, "no completion within"),
    ],
)
async def test_what_cannot_be_used_is_refused(answer: Any, error: type[Exception], said: str) -> None:
    with server(lambda body: answer) as (url, _), pytest.raises(error, match=said):
        await ask(url, request_s=0.5)


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(PeerLost, match="cannot be reached"):
        await ask("http://127.0.0.1:1")


async def test_at_most_max_requests_are_in_flight_and_an_interruption_ends_all() -> None:
    held, calls = threading.Event(), threading.Semaphore(0)

    def slow(body: dict[str, Any]) -> Any:
        calls.release()
        held.wait(20.0)
        return choice("ab")

    with server(slow) as (url, asked):
        engine = HttpEngine(HttpEngineSection(url=url, model_name="m", max_requests=2), TOKENIZER)
        try:
            async with asyncio.TaskGroup() as group:
                drawing = [group.create_task(engine.complete([3], DRAW)) for _ in range(5)]
                for _ in range(2):
                    await asyncio.to_thread(calls.acquire, timeout=10.0)
                assert engine.statistics() == {"requests": 2.0}
                engine.interrupt()
                engine.resume()
            assert {drawn.result().ending for drawn in drawing} == {"interrupted"}
            assert len(asked) == 2
            held.set()
            assert (await engine.complete([3], DRAW)).ending == "length"
        finally:
            held.set()
            await engine.close()


def test_training_with_it_is_refused() -> None:
    engine = {"kind": "http", "url": "http://127.0.0.1:8000", "model_name": "m"}
    pipeline = {"name": "p", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}, "engine": engine}
    with pytest.raises(ConfigError, match="serves weights that training cannot change"):
        validate({"pipeline": [pipeline]})


@contextmanager
def endpoint_of(policy: LanguagePolicy) -> Iterator[tuple[str, str]]:
    """The address and a key of Penstock's own endpoint, in front of the policy."""
    sampling = Sampling(max_new_tokens=8, stop_ids=policy.tokenizer.stop_ids, greedy=True)
    endpoint = Endpoint(TorchEngine(policy.module, pad_id=0, digest="x"), policy.tokenizer, sampling, None)
    thread = threading.Thread(target=lambda: asyncio.run(endpoint.run()))
    thread.start()
    try:
        yield endpoint.base_url.removesuffix("/v1"), endpoint.open()[0]
    finally:
        endpoint.close()
        thread.join()


@pytest.mark.slow
def test_a_served_model_measures_as_it_does_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    policy = build(TinyLanguageModel(hidden_size=16, layers=1, heads=2, max_positions=48))
    assert isinstance(policy, LanguagePolicy)
    scatter = torch.Generator().manual_seed(1)
    for tensor in policy.named_tensors().values():  # a fresh model only says its last token again
        tensor.detach().normal_(generator=scatter)
    policy.module.save_pretrained(tmp_path)  # type: ignore[operator]
    policy.save_config(tmp_path)
    here = saved(tmp_path, env={"name": "copy", "rewards": [f"{__name__}:by_letter"]})
    here = replaced(here, here.pipeline.rollout.model_copy(update={"max_new_tokens": 8}))
    expected = evaluate(here, prompts=12, samples=1, temperature=0.0)
    assert expected.high - expected.low > 0.01, "all prompts were answered alike"
    with endpoint_of(policy) as (url, key):
        monkeypatch.setenv("SERVER_KEY", key)
        table = {"kind": "http", "url": url, "model_name": "policy", "api_key_env": "SERVER_KEY", "max_requests": 5}
        there = served_by(here, table)
        assert there.title == f"policy at {url}, with the tokenizer of {tmp_path}"
        assert evaluate(there, prompts=12, samples=1, temperature=0.0) == expected
        monkeypatch.setenv("SERVER_KEY", "sk-wrong")
        with pytest.raises(RunFailed, match="refused a request"):
            evaluate(there, prompts=1, samples=1, temperature=0.0)
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(ConfigError, match="'SERVER_KEY' is not set"):
            evaluate(there, prompts=1, samples=1, temperature=0.0)
