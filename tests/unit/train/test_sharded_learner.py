"""A learner over several ranks, in real processes: the same steps, the same weights, and checkpoints for any number."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.batch.pack import PackSettings, pack_tokens
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, adapt, build
from penstock.engines.settings import LoraSection
from penstock.records.ids import Version
from penstock.runtime.ranks import file_store
from penstock.runtime.tensors import module_tensors
from penstock.train import checkpoint
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.sharding import idle_pass, join_world, shard
from penstock.train.share import split
from penstock.train.step import Learner
from penstock.train.world import ALONE, World
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import Publisher, write_version_parts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = TinyLanguageModel(alphabet="abcdefg", hidden_size=16, layers=2, heads=2, max_positions=32)
OPTIM = OptimizerSection(learning_rate=3e-3, warmup_steps=2, weight_decay=0.01)
LOSS = TokenLossSection(kl_coefficient=0.05, entropy_coefficient=0.01, average="sequence")
CPU = torch.device("cpu")
TIGHT = 1e-5
PEFT = importlib.util.find_spec("peft") is not None


def samples(step: int) -> list[dict[str, np.ndarray]]:
    """Five groups of two; with four ranks some have more micro-batches than others, and lengths differ. One sample has
    no trained token."""
    rng = np.random.default_rng(step)
    found: list[dict[str, np.ndarray]] = []
    for number in range(10):
        tokens = int(rng.integers(4, 14))
        mask = (np.arange(tokens) >= rng.integers(1, 4)).astype(np.uint8) * np.uint8(number != 3)
        ids = rng.integers(3, 9, tokens, dtype=np.int32)
        found.append({"token_ids": ids, "loss_mask": mask, "logprobs": (mask * -2.0).astype(np.float32)})
    return found


def share(step: int, world: World) -> list[Any]:
    everything = samples(step)
    advantages = np.random.default_rng(99 + step).normal(size=len(everything)).astype(np.float32)
    groups = split(
        [len(everything[i]["token_ids"]) + len(everything[i + 1]["token_ids"]) for i in range(0, 10, 2)], world.size
    )
    mine = [2 * group + i for group in groups[world.rank] for i in range(2)]
    return list(
        pack_tokens(
            [everything[i] for i in mine], advantages[mine], PackSettings(micro_batch_tokens=24, layout="padded")
        )
    )


def policy(dtype: torch.dtype) -> LanguagePolicy:
    made = build(MODEL)
    assert isinstance(made, LanguagePolicy)
    made.module.to(dtype)
    return made


def learner(world: World, dtype: torch.dtype = torch.float32, *, sharded: bool = False) -> Learner:
    trained, reference = policy(dtype), policy(dtype)
    if sharded:
        trained = shard(trained, world, CPU)
        reference = shard(reference, world, CPU, masters=False)
    return Learner(TokenObjective(trained, LOSS, reference=reference, packing="padded"), OPTIM, steps=20, world=world)


def adapting(world: World, dtype: torch.dtype = torch.float32, *, sharded: bool = False) -> Learner:
    """Trains an adapter; the reference is the base, with the adapter off."""
    adapted = adapt(policy(dtype), LoraSection(rank=2, alpha=4.0))
    trained = shard(adapted, world, CPU) if sharded else adapted
    return Learner(
        TokenObjective(trained, LOSS, reference=trained.base(), packing="padded"), OPTIM, steps=20, world=world
    )


def distilling(world: World, dtype: torch.dtype = torch.float32, *, sharded: bool = False) -> Learner:
    """An adapter that is trained to be another, with the teacher in shards too."""
    adapted, teacher = (adapt(policy(dtype), LoraSection(rank=2, alpha=4.0)) for _ in range(2))
    with torch.no_grad():
        for name, tensor in teacher.named_tensors().items():
            tensor.fill_(0.3 if ".lora_B." in name else 0.1)
    trained = shard(adapted, world, CPU) if sharded else adapted
    wise = shard(teacher, world, CPU, masters=False) if sharded else teacher
    return Learner(
        TokenObjective(trained, packing="padded", loss="distill", teacher=wise), OPTIM, steps=20, world=world
    )


def part_of_a_story(world: World, folder: Path, name: str, it: Learner, first: int, end: int) -> None:
    """Trains, saves and publishes under `name`; rank 0 leaves metrics and digest."""
    place = folder / f"{name}-on-{world.size}"
    metrics = [it.step(share(step, world)) for step in range(first, end)]
    tensors = it.policy.named_tensors()
    if world.rank:
        checkpoint.save_part(place, it, world)
        world.barrier()
        write_version_parts(Path((place / "writing").read_text()), tensors, rank=world.rank, bucket_bytes=4096)
        world.barrier()
        return
    checkpoint.save(place, it, world=world)

    def others(directory: Path) -> None:
        (place / "writing").write_text(str(directory))
        world.barrier()
        world.barrier()

    manifest = Publisher(place, "lineage", bucket_bytes=4096).publish(Version(it.steps), tensors, others=others)
    (place / "results.json").write_text(json.dumps({"metrics": metrics, "digest": manifest.digest}))


def rank_of(rank: int, ranks: int, folder: Path) -> None:
    """Two ranks train from the start; another number of ranks does so too, and goes on from what the two have saved."""
    torch.set_num_threads(1)
    world = join_world(file_store(folder / f"store-{ranks}", ranks), rank=rank, ranks=ranks, device=CPU, timeout_s=60)
    part_of_a_story(world, folder, "fresh", learner(world, sharded=True), 0, 3)
    half = learner(world, torch.bfloat16, sharded=True)
    if ranks == 2:
        part_of_a_story(world, folder, "half", half, 0, 2)
    else:
        resumed = learner(world, sharded=True)
        checkpoint.load(checkpoint.verify(folder / "fresh-on-2" / "step-00000003"), resumed)
        part_of_a_story(world, folder, "resumed", resumed, 3, 5)
        checkpoint.load(checkpoint.verify(folder / "half-on-2" / "step-00000002"), half)
        part_of_a_story(world, folder, "half", half, 2, 2)
    if PEFT:
        adapter_story(world, folder)
    if ranks == 1:
        assert_activations_are_recomputed(world)
    torch.distributed.destroy_process_group()


def assert_activations_are_recomputed(world: World) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    made = policy(torch.float32)
    made.checkpoint_activations()
    it = Learner(TokenObjective(shard(made, world, CPU), packing="padded"), OPTIM, world=world)
    it.step(share(0, world))
    layers = [layer for layer in made.module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.training and layer.gradient_checkpointing for layer in layers)


def adapter_story(world: World, folder: Path) -> None:
    if world.size == 2:
        part_of_a_story(world, folder, "adapter", adapting(world, sharded=True), 0, 3)
        part_of_a_story(world, folder, "half-adapter", adapting(world, torch.bfloat16, sharded=True), 0, 2)
        part_of_a_story(world, folder, "distilled", distilling(world, sharded=True), 0, 3)
        return
    resumed, half = adapting(world, sharded=True), adapting(world, torch.bfloat16, sharded=True)
    checkpoint.load(checkpoint.verify(folder / "adapter-on-2" / "step-00000003"), resumed)
    part_of_a_story(world, folder, "adapter", resumed, 3, 5)
    checkpoint.load(checkpoint.verify(folder / "half-adapter-on-2" / "step-00000002"), half)
    part_of_a_story(world, folder, "half-adapter", half, 2, 2)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story")
    for ranks in (2, 4, 1):
        commands = [[sys.executable, __file__, str(rank), str(ranks), str(folder)] for rank in range(ranks)]
        processes = [subprocess.Popen(command) for command in commands]
        try:
            assert [process.wait(200) for process in processes] == [0] * ranks
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return folder


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "results.json").read_text())


def restored(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, make: Callable[..., Learner] = learner
) -> Learner:
    """By one process, not sharded."""
    found = checkpoint.latest(folder / name)
    assert found is not None
    it = make(ALONE, dtype)
    checkpoint.load(found, it)
    return it


def furthest(left: Learner, right: Learner) -> float:
    ours, theirs = ({**one.policy.named_tensors(), **one.state()} for one in (left, right))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


def test_any_number_of_ranks_gives_the_same_steps(story: Path) -> None:
    alone = learner(ALONE)
    metrics = [alone.step(share(step, ALONE)) for step in range(3)]
    for ranks in (1, 2, 4):
        found = result(story, f"fresh-on-{ranks}")
        for expected, seen in zip(metrics, found["metrics"], strict=True):
            assert seen == pytest.approx(expected, rel=1e-4, abs=TIGHT)
        back = restored(story, f"fresh-on-{ranks}")
        assert furthest(back, alone) < TIGHT
        assert found["digest"] == digest_of(back.policy.named_tensors()), "published from shards, as from a whole"
    straight = [alone.step(share(step, ALONE)) for step in range(3, 5)]
    for ranks in (1, 4):
        assert result(story, f"resumed-on-{ranks}")["metrics"][-1] == pytest.approx(straight[-1], rel=1e-4, abs=TIGHT)
        assert furthest(restored(story, f"resumed-on-{ranks}"), alone) < TIGHT


def test_bfloat16_is_trained_through_float32_shards(story: Path) -> None:
    back = restored(story, "half-on-2", torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in back.policy.named_tensors().values())
    assert result(story, "half-on-2")["digest"] == digest_of(back.policy.named_tensors())
    masters = {name: tensor for name, tensor in back.state().items() if name.startswith("master/")}
    assert masters
    assert any(float((tensor - tensor.bfloat16().float()).abs().max()) > 0 for tensor in masters.values())
    for ranks in (1, 4):
        again = restored(story, f"half-on-{ranks}", torch.bfloat16)
        assert furthest(again, back) == 0, "bitwise the same after a resume on another number of ranks"


@pytest.mark.skipif(not PEFT, reason="needs peft: pip install 'penstock-rl[lora]'")
def test_an_adapter_is_trained_by_any_number_of_ranks(story: Path) -> None:
    alone = adapting(ALONE)
    metrics = [alone.step(share(step, ALONE)) for step in range(3)]
    found = result(story, "adapter-on-2")
    for expected, seen in zip(metrics, found["metrics"], strict=True):
        assert seen == pytest.approx(expected, rel=1e-4, abs=TIGHT)
    back = restored(story, "adapter-on-2", make=adapting)
    assert furthest(back, alone) < TIGHT
    assert all(".lora_" in name for name in back.policy.named_tensors())
    assert found["digest"] == digest_of(back.policy.named_tensors()), "the adapter alone is published"
    assert (story / "adapter-on-2" / "step-00000003" / "adapter_config.json").is_file()
    straight = [alone.step(share(step, ALONE)) for step in range(3, 5)]
    for ranks in (1, 4):
        assert result(story, f"adapter-on-{ranks}")["metrics"][-1] == pytest.approx(straight[-1], rel=1e-4, abs=TIGHT)
        assert furthest(restored(story, f"adapter-on-{ranks}", make=adapting), alone) < TIGHT
    half = restored(story, "half-adapter-on-2", torch.bfloat16, adapting)
    assert {name.partition("/")[0] for name in half.state()} >= {"master", "exp_avg"}
    for ranks in (1, 4):
        again = restored(story, f"half-adapter-on-{ranks}", torch.bfloat16, adapting)
        assert furthest(again, half) == 0, "bitwise the same after a resume on another number of ranks"


@pytest.mark.skipif(not PEFT, reason="needs peft: pip install 'penstock-rl[lora]'")
def test_an_adapter_is_distilled_by_two_ranks_as_by_one(story: Path) -> None:
    alone = distilling(ALONE)
    metrics = [alone.step(share(step, ALONE)) for step in range(3)]
    for expected, seen in zip(metrics, result(story, "distilled-on-2")["metrics"], strict=True):
        assert seen == pytest.approx(expected, rel=1e-4, abs=TIGHT)
    assert abs(metrics[0]["kl_teacher"]) > 1e-3
    assert furthest(restored(story, "distilled-on-2", make=distilling), alone) < TIGHT


def test_the_whole_model_is_in_the_files(story: Path, tmp_path: Path) -> None:
    checkpoint.export(story / "fresh-on-2" / "step-00000003", tmp_path / "model")
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    ours = restored(story, "fresh-on-2").policy.named_tensors()
    assert all(torch.equal(ours[name], tensor) for name, tensor in module_tensors(opened).items())
    assert float(idle_pass(opened).detach()) == 0.0
    assert not [path.name for path in (tmp_path / "model").iterdir() if path.suffix in (".distcp", ".metadata")]


if __name__ == "__main__":
    rank_of(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # like a role: the interpreter's shutdown sometimes aborts in a thread of torch
