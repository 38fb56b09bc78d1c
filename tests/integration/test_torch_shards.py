"""The torch engine over two ranks: the same tokens and log-probabilities as over one, with weights that change."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from running import Running, start, wait_for
from test_kill_matrix import assert_exact, finite
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection
from penstock.engines.torch.shards import ShardGroup, Shards
from penstock.errors import ConfigError, PeerLost
from penstock.runtime.tensors import module_tensors
from torch_ranks import CACHE_TOKENS, CPU, ROWS, follow, model

SETTINGS = TorchEngineSection(rows=ROWS, cache_tokens=CACHE_TOKENS)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOLERANCE = 1e-5
"""Of a log-probability: sums over a layer's width are made in two parts."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchEngine, Any]]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    ours, theirs = socket.socketpair()
    other = multiprocessing.get_context("spawn").Process(target=follow, args=(str(store), theirs), daemon=True)
    other.start()
    theirs.close()
    whole = model(0)
    shards = Shards(whole, ShardGroup(store, 0, 2, [ours], CPU))
    yield TorchEngine(whole, SETTINGS, pad_id=0, seed=5, shards=shards), other
    other.kill()
    other.join()
    ours.close()
    torch.distributed.destroy_process_group()


def alone(seed: int) -> TorchEngine:
    return TorchEngine(model(seed), SETTINGS, pad_id=0, seed=5)


PROMPTS = [[3, 4, 5, 6], [7, 8], [9] * 20, [10, 11, 12], [13], [14, 15], [16, 17, 18], [19]]


def check_equal(made: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(
            torch.from_numpy(one.logprobs), torch.from_numpy(other.logprobs), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("greedy", [True, False])
def test_two_ranks_draw_what_one_draws(ranks: tuple[TorchEngine, Any], greedy: bool) -> None:
    """More requests than rows, so rows leave, join and move; with equal seeds also the random draws are equal."""
    engine, single = ranks[0], alone(0)
    for both in (engine, single):
        both.generator.manual_seed(11)
    sampling = Sampling(max_new_tokens=12, greedy=greedy)
    repeats = [2, 1, 1, 3, 1, 1, 1, 1]
    check_equal(
        engine.generate(PROMPTS, sampling, repeats=repeats), single.generate(PROMPTS, sampling, repeats=repeats)
    )


def test_weights_change_on_all_ranks_between_the_same_two_steps(ranks: tuple[TorchEngine, Any]) -> None:
    engine = ranks[0]
    for seed in (1, 2):
        engine.stage(module_tensors(model(seed)))
        engine.swap(seed, f"digest {seed}")
        made = engine.generate(PROMPTS, Sampling(max_new_tokens=8, greedy=True))
        check_equal(made, alone(seed).generate(PROMPTS, Sampling(max_new_tokens=8, greedy=True)))
        assert {one.version for one in made} == {seed}
    engine.sleep()
    engine.load_in_place(module_tensors(model(3)), 3, "digest 3")
    engine.wake()

    async def changed_in_between() -> Completion:
        making = asyncio.ensure_future(engine.complete([3, 4, 5], Sampling(max_new_tokens=100, greedy=True)))
        while not engine.statistics()["requests_decoding"]:  # noqa: ASYNC110 - the engine announces nothing
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.stage, module_tensors(model(4)))
        await asyncio.to_thread(engine.swap, 4, "digest 4")
        return await making

    made = asyncio.run(changed_in_between())
    assert [version for _, version in made.versions.tolist()] == [3, 4]
    check_equal(
        engine.generate(PROMPTS, Sampling(max_new_tokens=8, greedy=True)),
        alone(4).generate(PROMPTS, Sampling(max_new_tokens=8, greedy=True)),
    )


def test_a_model_that_cannot_be_divided_is_refused(ranks: tuple[TorchEngine, Any]) -> None:
    shards: Any = ranks[0]._shards
    odd = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=3)
    )
    with pytest.raises(ConfigError, match="does not divide the model's num_attention_heads = 3"):
        Shards(odd, shards.group)


def test_a_rank_that_dies_fails_every_request(ranks: tuple[TorchEngine, Any]) -> None:
    engine, other = ranks
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with pytest.raises(PeerLost, match="the engine failed and serves no more requests"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=8))


def engine_rank(run: Running) -> psutil.Process:
    def find() -> psutil.Process | None:
        worker = run.children().get("letters.rollout.0")
        try:
            children = worker.children() if worker is not None else []
            return next((child for child in children if "engine_rank" in child.cmdline()), None)
        except psutil.NoSuchProcess:
            return None

    return wait_for(find, 90, "a second rank of the engine")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("prefetch", ["true", "false"])
def test_a_run_over_two_ranks_loses_one_of_them_and_no_prompt(folder: Path, prefetch: str) -> None:
    config = finite(folder, prompts=40, rollout=f"prefetch = {prefetch}")
    config.write_text(config.read_text() + "[pipeline.engine]\ntensor_parallel = 2\n")
    run = start(folder, config)
    run.wait_for_step(2, 150)
    engine_rank(run).send_signal(signal.SIGKILL)
    code, output = run.end(250)
    assert_exact(run, code, output, prompts=40)
    assert "letters.rollout.0 ended (PeerLost" in output
    log = (run.directory / "logs" / "letters.rollout.0.rank1.log").read_text()
    assert "ended gracefully" in log, "its successor left together with its worker"
