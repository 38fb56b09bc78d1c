"""Seconds and memory of a training step of a language model, beside a plain transformers loop over the same samples.

The plain loop is what one writes first: the model and AdamW in bfloat16 (float32 on a CPU), padded rows, all logits at
once, the same GRPO loss. Penstock computes in bfloat16 with float32 masters. Both train the same tokens in passes
of the same size; the samples are groups that share a prompt, with completions of varying length.

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
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from penstock.batch.pack import Packing, PackSettings, TokenMicroBatch, pack_tokens
from penstock.engines.models import LanguagePolicy
from penstock.engines.tokenizer import CharacterTokenizer
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "inner": 128, "vocabulary": 512},
    "135m": {"hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3, "inner": 1536, "vocabulary": 49152},
    "0.5b": {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "inner": 4864, "vocabulary": 151936},
    "7b": {"hidden_size": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "inner": 18944, "vocabulary": 152064},
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def model_of(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=32768,
        tie_word_embeddings=shape["hidden_size"] < 2048,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(config).to(dtype)  # type: ignore[arg-type]


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


def measured(step: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median seconds of a step after one to warm up, and peak GiB."""
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
    return float(np.median(seconds)), peak / 2**30


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock bench train", description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--tokens", type=int, default=65536 if torch.cuda.is_available() else 2048, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens of a forward pass")
    parser.add_argument("--prompt", type=int, default=512 if torch.cuda.is_available() else 64)
    parser.add_argument("--completion", type=int, default=1024 if torch.cuda.is_available() else 32, help="at most")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layouts", default="packed,prefix")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--no-plain", action="store_true", help="without the plain loop")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[arguments.model]
    samples = samples_of(arguments, shape["vocabulary"])
    advantages = np.random.default_rng(1).normal(size=len(samples)).astype(np.float32)
    read = sum(len(sample["token_ids"]) for sample in samples)
    rows: list[dict[str, Any]] = []

    def add(name: str, step: Callable[[], object], parameters: int) -> None:
        seconds, peak = measured(step, device, arguments.repeats)
        chip = torch.cuda.get_device_name() if device.type == "cuda" else ""
        flops = next((value for key, value in PEAK_FLOPS.items() if key in chip), None)
        mfu = None if flops is None else 6 * parameters * read / seconds / flops
        rows.append({"loop": name, "seconds": seconds, "peak_gib": peak, "tokens_per_s": read / seconds, "mfu": mfu})

    if not arguments.no_plain:
        model = model_of(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        padded = pack_tokens(samples, advantages, PackSettings(micro_batch_tokens=arguments.micro_batch))
        step = plain_loop(model, padded, device)
        add("plain transformers", step, sum(p.numel() for p in model.parameters()))
        del model, step
        _forget()
    for layout in arguments.layouts.split(","):
        rows_of(arguments, layout, shape, samples, advantages, device, add)
        _forget()
    first = rows[0]
    for row in rows:
        row |= {"speed": first["seconds"] / row["seconds"], "memory": row["peak_gib"] / (first["peak_gib"] or 1)}
    if arguments.json:
        print(json.dumps({"model": arguments.model, "tokens": read, "rows": rows}))
        return 0
    table = Table(title=f"{arguments.model}, {read} tokens a step, {len(samples)} samples, on {device.type}")
    for column in ("", "s a step", "tokens/s", "speed", "peak GiB", "memory", "MFU"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        figures = f"{row['seconds']:.3f}", f"{row['tokens_per_s']:.0f}", f"{row['speed']:.2f}x"
        table.add_row(row["loop"], *figures, f"{row['peak_gib']:.1f}", f"{row['memory']:.2f}x", mfu)
    Console().print(table)
    return 0


def rows_of(
    arguments: argparse.Namespace,
    layout: Packing,
    shape: dict[str, Any],
    samples: list[dict[str, np.ndarray]],
    advantages: np.ndarray,
    device: torch.device,
    add: Callable[[str, Callable[[], object], int], None],
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = LanguagePolicy(model_of(shape, device, dtype), CharacterTokenizer("ab"))
    if arguments.checkpointing:
        policy.checkpoint_activations()
    objective = TokenObjective(policy, TokenLossSection(), packing=layout)
    learner = Learner(objective, OptimizerSection(learning_rate=1e-6))
    batches = pack_tokens(samples, advantages, PackSettings(micro_batch_tokens=arguments.micro_batch, layout=layout))
    add(f"penstock, {layout}", partial(learner.step, batches), policy.parameter_count())


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
