"""Tokens per second of decoding: the torch engine beside `generate`, vLLM if there is one, and the memory's limit.

Every completion has the same length (no early stop), unless `--lengths geometric`: then each ends with the same chance
at every step, after a quarter of `--new` on average, and `generate` waits for the longest, which flatters the engine.
vLLM is asked where it is installed, or through `--vllm-python` (default: PENSTOCK_VLLM_PYTHON), the interpreter of an
environment that has it and this package. Models have the shape and vocabulary of well-known small ones and random
weights. "Limit" is what the memory allows if every step read each weight, key and value once and did nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from _models import EOS, SHAPES, qwen2, release, spread
from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection
from penstock.launch.gpus import GpuWatch


def model_of(shape: dict[str, int], device: torch.device, positions: int) -> Any:
    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = qwen2(shape, device, dtype, positions=positions).eval()
    model.config._attn_implementation = "sdpa"
    return model


def rates_of(work: Callable[[], int], rounds: int, warm: int = 1) -> list[float]:
    """Tokens per second of each round."""
    for _ in range(warm):
        work()
    rates = []
    for _ in range(rounds):
        began = time.monotonic()
        tokens = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(tokens / (time.monotonic() - began))
    return rates


def bandwidth(device: torch.device) -> float:
    """Bytes per second that this memory copies, read and written counted."""
    size = (2 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * statistics.median(rates_of(lambda: target.copy_(source).numel(), 5, 2))


def limit(model: Any, rows: int, prompt: int, new: int, bytes_per_s: float) -> float:
    config = model.config
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    per_token = 2 * config.num_hidden_layers * width * model.dtype.itemsize
    step_bytes = weights + rows * (prompt + new / 2) * per_token
    return rows * bytes_per_s / step_bytes


def stops_of(shape: dict[str, int], chosen: Any) -> tuple[int, ...]:
    """Tokens that end a completion: so large a share of the vocabulary that one in `new / 4` is among them."""
    if chosen.lengths == "equal":
        return ()
    return tuple(range(EOS, EOS + max(1, round(4 * shape["vocabulary"] / chosen.new))))


def by_library(model: Any, prompts: list[list[int]], new: int, stops: tuple[int, ...]) -> int:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        eos_token_id=list(stops) or None,
        return_dict_in_generate=True,
        output_logits=False,
    )
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config).sequences[
            :, ids.shape[1] :
        ]
    made = made.cpu()
    ended = torch.isin(made, torch.tensor(stops)).int().cumsum(1).cumsum(1) > 1
    return int((~ended).sum())


def by_engine(engine: TorchEngine, prompts: list[list[int]], sampling: Sampling) -> int:
    async def all_at_once() -> list[Completion]:
        return await asyncio.gather(*(engine.complete(prompt, sampling) for prompt in prompts))

    return sum(len(one.token_ids) for one in asyncio.run(all_at_once()))


def prompts_of(shape: dict[str, int], rows: int, chosen: Any) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, shape["vocabulary"], (rows, chosen.prompt)).tolist()


def by_vllm(shape: dict[str, int], rows_list: list[int], chosen: Any) -> dict[int, list[float]]:
    """In this interpreter, if it has vLLM: one server for all numbers of rows."""
    try:
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(shape, torch.device("cpu"), 2048)
        model.config.architectures = ["Qwen2ForCausalLM"]
        model.config.save_pretrained(folder)
        del model
        server = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16" if on_gpu else "float32",
            max_model_len=2048,
            max_num_seqs=max(rows_list),
            enable_prefix_caching=False,  # every round reads its prompts
            **({"gpu_memory_utilization": 0.5} if on_gpu else {"enforce_eager": True}),
        )
        stops = stops_of(shape, chosen)
        how = SamplingParams(
            max_tokens=chosen.new, ignore_eos=not stops, stop_token_ids=list(stops), logprobs=0, detokenize=False
        )

        def work(rows: int) -> int:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts_of(shape, rows, chosen)]
            made = server.generate(asked, how, use_tqdm=False)
            return sum(len(one.outputs[0].token_ids) for one in made)

        return {rows: rates_of(partial(work, rows), chosen.rounds) for rows in rows_list}


def by_vllm_elsewhere(name: str, rows_list: list[int], chosen: Any) -> dict[int, list[float]]:
    """The same in the interpreter that is named."""
    rows = ",".join(map(str, rows_list))
    flags = ["--shapes", name, "--rows", rows, "--lengths", chosen.lengths]
    for key in ("prompt", "new", "rounds"):
        flags += [f"--{key}", str(getattr(chosen, key))]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    settings |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a GPU that was asked about cannot be used after a fork
    settings |= {"TORCHDYNAMO_DISABLE": "1"} if not torch.cuda.is_available() else {}
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        command = [chosen.vllm_python, __file__, *flags, "--only-vllm", found.name]
        subprocess.run(command, env=os.environ | settings, check=True)
        return {int(rows): rates for rows, rates in json.load(found).items()}


def measured(model: Any, name: str, rows: int, chosen: Any, bytes_per_s: float) -> dict[str, Any]:
    without, shape, on_gpu = chosen.without.split(","), SHAPES[name], model.device.type == "cuda"
    stops, prompts = stops_of(shape, chosen), prompts_of(shape, rows, chosen)
    sampling = Sampling(max_new_tokens=chosen.new, stop_ids=stops)
    room = TorchEngineSection(rows=rows, cache_tokens=rows * (chosen.prompt + chosen.new + 64))
    line: dict[str, Any] = {}
    if "library" not in without:
        line["generate"] = rates_of(lambda: by_library(model, prompts, chosen.new, stops), chosen.rounds)
    engine = TorchEngine(model, room, pad_id=0, version=1, digest="d")
    by_engine(engine, prompts, sampling)  # captures its graphs
    with GpuWatch(0.2) as gpus:
        line["engine"] = rates_of(lambda: by_engine(engine, prompts, sampling), chosen.rounds)
    line["busy"] = max(gpus.busy().values(), default=None)
    if "eager" not in without and on_gpu:
        without_graphs = room.model_copy(update={"graphs": False})
        eager = TorchEngine(model, without_graphs, pad_id=0, version=1, digest="d")
        line["eager"] = rates_of(lambda: by_engine(eager, prompts, sampling), chosen.rounds)
    line["limit"] = limit(model, rows, chosen.prompt, chosen.new, bytes_per_s)
    return line


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", choices=["equal", "geometric"], default="equal")
    parser.add_argument("--without", default="", help="library, vllm, eager")
    parser.add_argument("--vllm-python", default=os.environ.get("PENSTOCK_VLLM_PYTHON", ""))
    parser.add_argument("--only-vllm", type=Path, help="in this interpreter, to this file; used by --vllm-python")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = (chosen.shapes or ("135m,0.5b" if device.type == "cuda" else "7m,135m")).split(",")
    rows_list = [int(one) for one in chosen.rows.split(",")]
    if chosen.quick:
        rows_list, chosen.rounds, chosen.new = rows_list[:2], 1, min(chosen.new, 32)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if chosen.only_vllm is not None:
        chosen.only_vllm.write_text(json.dumps(by_vllm(SHAPES[shapes[0]], rows_list, chosen)))
        return 0
    bytes_per_s = bandwidth(device)
    found: list[dict[str, Any]] = []
    for name in shapes:
        served: dict[int, list[float]] = {}
        if "vllm" not in chosen.without.split(","):
            ask = partial(by_vllm_elsewhere, name) if chosen.vllm_python else partial(by_vllm, SHAPES[name])
            served = ask(rows_list, chosen)
        model = model_of(SHAPES[name], device, 2048)
        for rows in rows_list:
            line: dict[str, Any] = {"model": name, "rows": rows, "vllm": served.get(rows)}
            found.append(line | measured(model, name, rows, chosen, bytes_per_s))
            print(found[-1], flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([figure for line in found for figure in figures_of(line, chosen)], indent=2))
    table = Table(title=f"tokens/s, {chosen.prompt} + {chosen.new} tokens, {device}, {bytes_per_s / 1e9:.0f} GB/s")
    columns = ["model", "rows", "engine", "eager", "generate", "vllm", "limit"]
    for column in columns:
        table.add_column(column, justify="right")
    for line in found:
        table.add_row(*(_shown(line.get(column)) for column in columns))
    console = Console()
    console.print(table)
    console.print(f"medians (least to most); `generate` of {release('transformers')}, sampling with a dynamic cache")
    for line in found:
        figures = figures_of(line, chosen)
        ratios = ", ".join(f"{figure['ratio']:.2f} of {figure['peer_name'].partition(',')[0]}" for figure in figures)
        busy = "no GPU" if line["busy"] is None else f"GPU busy {line['busy']:.0%}"
        console.print(f"{line['model']}, {line['rows']} rows: {ratios}; {busy}")
    if not any(line.get("vllm") for line in found):
        console.print("vLLM: left out, it needs a GPU and an interpreter that has it")
    return 0


def figures_of(line: dict[str, Any], chosen: Any) -> list[dict[str, Any]]:
    """The engine beside each peer, and beside the limit."""
    name = f"{line['model']}, {line['rows']} rows, {chosen.prompt} + {chosen.new} tokens, {chosen.lengths} lengths"
    ours = statistics.median(line["engine"])
    figures = []
    for peer, known in (("generate", release("transformers")), ("vllm", "vLLM"), ("limit", "the memory's bandwidth")):
        if line.get(peer) is not None:
            beside = line[peer] if peer == "limit" else statistics.median(line[peer])
            figure = {"name": name, "unit": "tokens/s", "ours": ours, "peer": beside, "ratio": ours / beside}
            figures.append(
                figure | {"peer_name": f"{peer}, {known}", "ours_rounds": line["engine"], "gpu_busy": line["busy"]}
            )
    return figures


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return spread(value)
    return "–" if value is None else f"{value:,.0f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
