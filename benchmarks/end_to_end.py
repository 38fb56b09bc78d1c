"""Samples per second of a whole run on one device, beside a plain synchronous loop with the same model and batch.

The plain loop is what one writes first: `generate` for a batch, then forward and backward over it, then AdamW; the
model in bfloat16 on a GPU and float32 on a CPU, there with one thread or all, whichever is faster. Penstock runs as a
user would run it: a worker, a trainer and a controller on the same device, with samples up to two versions old; with
vLLM too, where `--vllm-python` (default: PENSTOCK_VLLM_PYTHON) names its interpreter. Weights are random, so
completions almost never end early and all generate the same number of tokens; with `--lengths geometric` any of some
tokens ends one, after a quarter of `--tokens` on average, and the plain loop waits for the longest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from _models import EOS, PAD, SHAPES, qwen2, release, spread
from penstock.launch.gpus import GpuWatch
from penstock.runtime.interpreter import python_command

LETTERS = "abcdefghijklmnopqrstuvwxyz>"


def by_parity(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward that differs within every group and costs nothing."""
    return [float(len(completion) % 2) for completion in completions]


def save_model(shape: dict[str, int], directory: Path) -> None:
    """A random Qwen2 of this shape with a tokenizer of single letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    qwen2(shape, torch.device("cpu"), torch.float32, positions=4096).save_pretrained(directory)
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<unk>": 2} | {letter: 3 + at for at, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


def plain_loop(directory: Path, options: argparse.Namespace, device: torch.device) -> tuple[list[float], float]:
    """Samples per second of each step after the first, and the mean length of their completions."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    prompts = torch.randint(3, 3 + len(LETTERS), (options.samples, 8), device=device)
    rows = max(1, options.micro_batch // (8 + options.tokens))
    stops = stop_ids(options)
    rates, lengths = [], []
    for _ in range(options.plain_steps):
        began = time.monotonic()
        with torch.inference_mode():
            whole = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                max_new_tokens=options.tokens,
                **({"eos_token_id": stops} if stops else {}),
            )
        for chunk in whole.clone().split(rows):
            logprobs = torch.log_softmax(model(chunk).logits[:, 7:-1].float(), -1)
            taken = logprobs.gather(-1, chunk[:, 8:, None])
            if stops:
                taken = taken * (chunk[:, 8:, None] != 0)  # padding after the end
            (-(taken * torch.randn(len(chunk), 1, 1, device=device)).sum() / whole.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(options.samples / (time.monotonic() - began))
        ends = torch.isin(whole[:, 8:], torch.tensor(stops, dtype=whole.dtype, device=device))
        lengths.append(float((ends.cumsum(1).cumsum(1) <= 1).sum()) / options.samples)  # up to the first end
    return rates[1:] or rates, statistics.mean(lengths[1:] or lengths)


def stop_ids(options: argparse.Namespace) -> list[int]:
    """Tokens that end a completion, none of them a letter. A random model draws one in `tokens / 4` tokens."""
    if options.lengths == "equal":
        return []
    vocabulary = SHAPES[options.model]["vocabulary"]
    return list(range(vocabulary - max(1, round(4 * vocabulary / options.tokens)), vocabulary))


def configuration(directory: Path, options: argparse.Namespace, runs: Path, vllm: bool) -> str:
    here, rows = json.dumps(str(Path(__file__).parent)), options.rows or -(-options.samples // options.workers)
    engine = f"rows = {rows}\ncache_tokens = {rows * (options.tokens + 64)}"
    if vllm:
        engine = f'kind = "vllm"\nmax_requests = {rows}\npython = {json.dumps(options.vllm_python)}\n'
        engine += f"eager = {json.dumps(not torch.cuda.is_available())}"
    return f"""
[run]
name = "end-to-end"
dir = {json.dumps(str(runs))}
extra_path = [{here}]
[[pipeline]]
name = "p"
steps = {options.steps}
[pipeline.env]
name = "copy"
options = {{ length = 7 }}
rewards = ["end_to_end:by_parity"]
[pipeline.model]
kind = "path"
path = {json.dumps(str(directory))}
[pipeline.engine]
{engine}
[pipeline.rollout]
group_size = 8
workers = {options.workers}
stop_ids = {stop_ids(options)}
max_new_tokens = {options.tokens}
[pipeline.train]
groups_per_step = {options.samples // 8}
tokens_per_micro_batch = {options.micro_batch}
max_staleness = 2
[pipeline.checkpoint]
every_steps = 1000
"""


def penstock_run(
    directory: Path, options: argparse.Namespace, folder: Path, *, vllm: bool
) -> tuple[list[float], float, float]:
    """Samples per second in the second and the last third of the steps, the mean length of their completions, and the
    share of that time in which the GPU was busy."""
    folder.mkdir()
    path = folder / "run.toml"
    path.write_text(configuration(directory, options, folder / "runs", vllm))
    with GpuWatch(0.5) as gpus:
        subprocess.run(python_command("-m", "penstock.cli.entry", "run", str(path)), check=True)
    [lines] = (folder / "runs").glob("*/metrics.jsonl")
    steps = [line for line in map(json.loads, lines.read_text().splitlines()) if line["kind"] == "step"]
    at = [line["at"] for line in steps]
    first = len(at) // 3
    ends = (first, (first + len(at)) // 2, len(at) - 1)
    rates = [options.samples * (b - a) / (at[b] - at[a]) for a, b in itertools.pairwise(ends)]
    # Not while the engine starts, nor at the end.
    busy = [share for when, shares in gpus.samples for share in shares.values() if at[first] <= when <= at[-1]]
    length = statistics.mean(line["completion_length_mean"] for line in steps[first:])
    return rates, length, statistics.mean(busy) if busy else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="0.5b" if cuda else "tiny")
    parser.add_argument("--samples", type=int, default=256 if cuda else 64, help="of a step")
    parser.add_argument("--tokens", type=int, default=256 if cuda else 32, help="of a completion")
    parser.add_argument(
        "--rows", type=int, default=0, help="of each engine; by default all engines together have one for each sample"
    )
    parser.add_argument("--workers", type=int, default=1, help="rollout workers, which share the GPU")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens of a forward pass")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--plain-steps", type=int, default=4)
    parser.add_argument("--lengths", choices=["equal", "geometric"], default="equal")
    parser.add_argument("--vllm-python", default=os.environ.get("PENSTOCK_VLLM_PYTHON", ""))
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if cuda else "cpu")
    what = f"{options.model}, {options.samples} x {options.tokens} tokens, {options.lengths} lengths, on {device.type}"
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(SHAPES[options.model], folder / "model")
        plain, plain_length, threads = [0.0], 0.0, 0
        for tried in (
            (1,) if cuda else sorted({1, os.cpu_count() or 1})
        ):  # on a busy CPU more threads wait for each other
            torch.set_num_threads(tried)
            found, length = plain_loop(folder / "model", options, device)
            if statistics.median(found) > statistics.median(plain):
                plain, plain_length, threads = found, length, tried
        for engine in ("torch", "vllm") if options.vllm_python else ("torch",):
            rates, length, busy = penstock_run(folder / "model", options, folder / engine, vllm=engine == "vllm")
            figures.append(
                {
                    "name": f"samples/s with {engine}, {what}",
                    "unit": "samples/s",
                    "ours": statistics.median(rates),
                    "peer": statistics.median(plain),
                    "peer_name": f"plain loop, {release('transformers')}, {release('torch')}",
                    "peer_settings": f"micro-batches of {options.micro_batch} tokens, {options.plain_steps} steps, "
                    f"{threads} torch threads (the faster of 1 and all cores)",
                    "ratio": statistics.median(rates) / statistics.median(plain),
                    "ours_rounds": rates,
                    "peer_rounds": plain,
                    "ours_tokens_per_s": statistics.median(rates) * length,
                    "peer_tokens_per_s": statistics.median(plain) * plain_length,
                    "gpu_busy": busy,
                }
            )
    for figure in figures:
        ours, peer = spread(figure["ours_rounds"], ".1f"), spread(plain, ".1f")
        print(f"{figure['name']}: penstock {ours}, {figure['peer_name']} {peer}, ratio {figure['ratio']:.2f}")
        print(f"  {figure['ours_tokens_per_s']:,.0f} tokens/s, peer {figure['peer_tokens_per_s']:,.0f}", end="; ")
        busy = f"GPU busy {figure['gpu_busy']:.0%}" if cuda else "no GPU"
        print(f"{busy}; peer: {figure['peer_settings']}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    if not options.vllm_python:
        print("vLLM: left out, no --vllm-python was given")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
