"""Seconds and memory of a training step of a language model, beside a plain transformers loop over the same samples.

The plain loop is what one writes first: the model and AdamW in bfloat16 (float32 on a CPU), padded rows, all logits at
once, the same GRPO loss. Penstock computes in bfloat16 with float32 masters. Both train the same tokens in passes
of the same size; the samples are groups that share a prompt, with completions of varying length.

With both layouts `packed` and `prefix`, what it gains to read the prompt of a group once is printed too: it grows with
the length of the prompt beside that of the completions (`--prompt`, `--completion`) and with the size of a group.

`recomputed` is `train.activation_checkpointing = true`, the default of sharded models on GPUs: `prefix`, activations
computed again, passes of 65,536 tokens.

MFU counts 6 FLOPs per parameter and token that a padding-free step without shared prompts would read, beside the
device's dense bfloat16 peak. Models have random weights: only their shape matters.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from _models import SHAPES, qwen2, release
from penstock.batch.pack import Packing, PackSettings, TokenMicroBatch, pack_tokens
from penstock.engines.models import LanguagePolicy, adapt
from penstock.engines.settings import LoraSection
from penstock.engines.tokenizer import CharacterTokenizer
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.sharding import join_world, shard
from penstock.train.step import Learner
from penstock.train.world import ALONE, World

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def samples_of(arguments: argparse.Namespace, vocabulary: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    samples: list[dict[str, np.ndarray]] = []
    tokens = 0
    while tokens < arguments.tokens:
        prompt = rng.integers(0, vocabulary, arguments.prompt)
        for _ in range(arguments.group):
            completion = rng.integers(0, vocabulary, rng.integers(arguments.completion // 4, arguments.completion + 1))
            ids = np.concatenate([prompt, completion]).astype(np.int32)
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            logprobs = (mask * -np.log(vocabulary)).astype(np.float32)
            samples.append({"token_ids": ids, "loss_mask": mask, "logprobs": logprobs})
            tokens += len(ids)
    return samples


def plain_loop(model: Any, batches: Sequence[TokenMicroBatch], device: torch.device) -> Callable[[], None]:
    """A step as one writes it first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    total = sum(int(batch.loss_mask_RT.sum()) for batch in batches)

    def step() -> None:
        for batch in batches:
            ids = torch.from_numpy(batch.token_ids_RT.astype(np.int64)).to(device)
            mask = torch.from_numpy(batch.loss_mask_RT[:, 1:].astype(np.float32)).to(device)
            behaviour = torch.from_numpy(batch.logprobs_RT[:, 1:]).to(device)
            advantages = torch.from_numpy(batch.advantages_N).to(device)[:, None]
            log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float(), -1)
            current = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
            weight = (current.detach() - behaviour).exp().clamp(max=2.0)
            ratio = (current - current.detach()).exp()
            (-(weight * ratio * advantages * mask).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(step: Callable[[], object], device: torch.device, repeats: int) -> tuple[list[float], float]:
    """Seconds of each step after one to warm up, and peak GiB."""
    step()
    seconds: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return seconds, peak / 2**30


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock bench train", description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--tokens", type=int, default=65536 if torch.cuda.is_available() else 4096, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens of a forward pass")
    parser.add_argument("--prompt", type=int, default=512 if torch.cuda.is_available() else 256)
    parser.add_argument("--completion", type=int, default=1024 if torch.cuda.is_available() else 32, help="at most")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layouts", default="packed,prefix,recomputed", help="a comma between them; see above")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in all of them")
    parser.add_argument("--fsdp", action="store_true", help="hold the weights as FSDP2 does (train.fsdp)")
    parser.add_argument("--offload", action="store_true", help="masters and moments in host memory (optimizer.offload)")
    parser.add_argument("--optimizer", default="torch.optim:AdamW")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    parser.add_argument("--no-plain", action="store_true", help="without the plain loop")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[arguments.model]
    samples = samples_of(arguments, shape["vocabulary"])
    advantages = np.random.default_rng(1).normal(size=len(samples)).astype(np.float32)
    read = sum(len(sample["token_ids"]) for sample in samples)
    rows: list[dict[str, Any]] = []

    def add(name: str, step: Callable[[], object], parameters: int, computed: int) -> None:
        every, peak = measured(step, device, arguments.repeats)
        seconds = float(np.median(every))
        chip = torch.cuda.get_device_name() if device.type == "cuda" else ""
        flops = next((value for key, value in PEAK_FLOPS.items() if key in chip), None)
        mfu = None if flops is None else 6 * parameters * read / seconds / flops
        row = {"loop": name, "seconds": seconds, "least_s": min(every), "most_s": max(every)}
        row |= {"peak_gib": peak, "tokens_per_s": read / seconds, "mfu": mfu}
        rows.append(row | {"tokens_computed": computed})

    if not arguments.no_plain:
        model = qwen2(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        padded = pack_tokens(
            samples, advantages, PackSettings(micro_batch_tokens=arguments.micro_batch, layout="padded")
        )
        step = plain_loop(model, padded, device)
        computed = sum(batch.token_ids_RT.size for batch in padded)
        add(f"plain loop, {release('transformers')}", step, sum(p.numel() for p in model.parameters()), computed)
        del model, step
        _forget()
    for name in arguments.layouts.split(","):
        rows_of(arguments, name, shape, samples, advantages, device, add)
        _forget()
    first = rows[0]
    for row in rows:
        row |= {"speed": first["seconds"] / row["seconds"], "memory": row["peak_gib"] / (first["peak_gib"] or 1)}
    if arguments.json is not None:
        figures = [figure for row in rows for figure in figures_of(row, first, f"{arguments.model}, {read} tokens")]
        arguments.json.write_text(json.dumps(figures, indent=2))
    shown = {row["loop"].removeprefix("penstock, "): row for row in rows}
    table = Table(title=f"{arguments.model}, {read} tokens a step, {len(samples)} samples, on {device.type}")
    for column in ("", "s a step", "tokens/s", "tokens computed", "speed", "peak GiB", "memory", "MFU"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        figures = (
            f"{row['seconds']:.3f} ({row['least_s']:.3f} to {row['most_s']:.3f})",
            f"{row['tokens_per_s']:.0f}",
            str(row["tokens_computed"]),
            f"{row['speed']:.2f}x",
        )
        table.add_row(row["loop"], *figures, f"{row['peak_gib']:.1f}", f"{row['memory']:.2f}x", mfu)
    Console().print(table)
    if "packed" in shown and "prefix" in shown:
        packed, prefix = shown["packed"], shown["prefix"]
        print(
            f"prompts of {arguments.prompt} tokens read once for a group of {arguments.group}: "
            f"{packed['tokens_computed'] / prefix['tokens_computed']:.2f} times fewer tokens, "
            f"{packed['seconds'] / prefix['seconds']:.2f} times as fast as packed"
        )
    return 0


def figures_of(row: dict[str, Any], first: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """Seconds and memory of a step beside the first loop that was measured."""
    about = {"peer_name": first["loop"], "mfu": row["mfu"], "tokens_computed": row["tokens_computed"]}
    return [
        {"name": f"{row['loop']}, {what}", "unit": unit, "ours": row[key], "peer": first[key], "ratio": ratio} | about
        for unit, key, ratio in (("s", "seconds", row["speed"]), ("GiB", "peak_gib", row["memory"]))
    ]


def rows_of(
    arguments: argparse.Namespace,
    name: str,
    shape: dict[str, Any],
    samples: list[dict[str, np.ndarray]],
    advantages: np.ndarray,
    device: torch.device,
    add: Callable[[str, Callable[[], object], int, int], None],
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sharded = arguments.fsdp
    policy = LanguagePolicy(qwen2(shape, device, dtype), CharacterTokenizer("ab"))
    parameters = policy.parameter_count()
    if arguments.lora:
        policy = adapt(policy, LoraSection(rank=arguments.lora))
    layout: Packing = "prefix" if name == "recomputed" else name  # type: ignore[assignment]
    if arguments.checkpointing or name == "recomputed":
        policy.checkpoint_activations()
    world = ALONE
    if sharded:
        world = one_rank(device)
        policy = shard(policy, world, device)
    objective = TokenObjective(policy, TokenLossSection(), packing=layout)
    settings = OptimizerSection(name=arguments.optimizer, learning_rate=1e-6, offload=arguments.offload)
    learner = Learner(objective, settings, world=world)
    learner.onload(device)
    tokens = 65_536 if name == "recomputed" else arguments.micro_batch
    batches = pack_tokens(samples, advantages, PackSettings(micro_batch_tokens=tokens, layout=layout))
    computed = sum(batch.token_ids_RT.size for batch in batches)
    add(f"penstock, {name}", partial(learner.step, batches), parameters, computed)


@cache
def one_rank(device: torch.device) -> World:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return join_world(store, rank=0, ranks=1, device=device, timeout_s=600)


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
