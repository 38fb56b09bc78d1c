"""Tokens per second of language-model generation: batches to their end, or requests that join and leave at any step.

Completion lengths vary widely: the model gives every token the same probability, so a completion ends with the same
chance at every step. Every way of generating does the same job through the workload that a worker would use, to the
last token of the last episode. The peer in a batch is the transformers library's own `generate`. "All rows busy" is
what the rows would give if none were ever empty: batches of equal lengths, as long as an average completion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import string
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.continuous import ContinuousEngine
from penstock.engines.torch.static import TorchEngine
from penstock.envs.protocol import Prompt
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout.episode import Episode
from penstock.rollout.io.language_workload import LanguageWorkload, PreparedPrompt
from penstock.rollout.io.request_workload import RequestWorkload

GROUP = 8
PROMPT_CHARACTERS = 16
REPLY = "xyzzy"
SPECIAL_TOKENS = 3
MEAN_TOKENS = 64
"""Of a completion: the vocabulary has so many tokens, and one of them ends it."""


class Conversation:
    """Random prompts; after each completion but the last a short reply, which takes a while to come."""

    count = None

    def __init__(self, turns: int, reply_s: float) -> None:
        self.turns = turns
        self.reply_s = reply_s

    def prompt(self, position: int) -> Prompt:
        letters = np.random.default_rng(position).integers(0, 26, PROMPT_CHARACTERS)
        return Prompt("".join(string.ascii_lowercase[letter] for letter in letters))

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [0.0] * len(completions)

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
        if len(completions) >= self.turns:
            return None
        time.sleep(self.reply_s)
        return REPLY


class LibraryEngine:
    """The peer: one call of the library for each batch, which keeps no log-probabilities and knows no versions."""

    def __init__(self, policy: LanguagePolicy) -> None:
        self.module: Any = policy.module
        self.pad_id = policy.tokenizer.pad_id
        self.max_positions = self.module.config.max_position_embeddings
        self.device = next(policy.module.parameters()).device

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, repeats: Sequence[int] | None = None
    ) -> list[Completion]:
        times = repeats or [1] * len(prompts)
        rows = [prompt for prompt, repeat in zip(prompts, times, strict=True) for _ in range(repeat)]
        longest = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (longest - len(row)) + list(row) for row in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.device)
        with torch.inference_mode():
            drawn = self.module.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=list(sampling.stop_ids),
                pad_token_id=self.pad_id,
                top_k=0,
            )[:, longest:].cpu()
        completions = []
        for row in drawn.tolist():
            length = next((at + 1 for at, token in enumerate(row) if token in sampling.stop_ids), len(row))
            tokens = np.array(row[:length], dtype=np.int32)
            versions = np.zeros((1, 2), np.int32)
            completions.append(Completion(tokens, np.zeros(length, np.float32), versions, "stop", 0, ""))
        return completions


class Contest:
    """The same work for every way of generating."""

    def __init__(self, policy: LanguagePolicy, rows: int, turns: int, reply_s: float, batches: int) -> None:
        self.rows = rows
        self.turns = turns
        self.batches = batches
        environment = Conversation(turns, reply_s)
        options: dict[str, Any] = {"max_new_tokens": 4 * MEAN_TOKENS, "max_turns": turns}
        pad_id = policy.tokenizer.pad_id
        tokens = rows * (PROMPT_CHARACTERS + turns * (4 * MEAN_TOKENS + len(REPLY)))
        continuous = ContinuousEngine(policy.module, pad_id=pad_id, rows=rows, cache_tokens=tokens, kept_tokens=tokens)
        self.request_workload = RequestWorkload(
            environment, continuous, policy.tokenizer, reply_threads=rows, **options
        )
        self.batch_workload = LanguageWorkload(
            environment, TorchEngine(policy.module, pad_id=pad_id), policy.tokenizer, **options
        )
        self.library_workload = LanguageWorkload(environment, LibraryEngine(policy), policy.tokenizer, **options)
        self.seen = 0
        self.clock = time.perf_counter

    def ways(self) -> dict[str, Callable[[], int]]:
        return {
            "continuous": self.continuous,
            "static": lambda: self.in_batches(self.batch_workload),
            "library": lambda: self.in_batches(self.library_workload),
        }

    def continuous(self) -> int:
        """All of it in flight at once; the engine seats as many as it has rows."""
        return _tokens(asyncio.run(self.request_workload.generate(self._prompts(self.batches * self.rows))))

    def in_batches(self, workload: LanguageWorkload) -> int:
        return sum(_tokens(workload.generate(self._prompts(self.rows))) for _ in range(self.batches))

    def busy_tokens_per_s(self) -> float:
        """Decoding with no row ever empty."""
        engine = self.batch_workload.engine
        prompts = [one.token_ids for one in self._prompts(self.rows)]
        started = self.clock()
        made = engine.generate(prompts, Sampling(max_new_tokens=MEAN_TOKENS), repeats=[GROUP] * len(prompts))
        return sum(len(one.token_ids) for one in made) / (self.clock() - started)

    def _prompts(self, samples: int) -> list[PreparedPrompt]:
        prompts = []
        for _ in range(samples // GROUP):
            self.seen += 1
            ids = tuple(SampleId(self.seen * GROUP + member) for member in range(GROUP))
            lease = PromptLease(PromptIndex(self.seen), 0, ids, tuple(range(GROUP)), Version(0))
            prepared = self.batch_workload.prepare(lease)
            assert isinstance(prepared, PreparedPrompt)
            prompts.append(prepared)
        return prompts


def _tokens(generated: Sequence[Sequence[Any]]) -> int:
    episodes = [episode for group in generated for episode in group]
    assert all(isinstance(episode, Episode) for episode in episodes), "an episode failed"
    return sum(episode.generated_tokens for episode in episodes)


def measure(contest: Contest, rounds: int) -> dict[str, float]:
    """Median tokens per second of each way; they take turns, so that a busy machine is busy for all of them."""
    rates: dict[str, list[float]] = {}
    contest.busy_tokens_per_s()  # a warm-up
    for _ in range(rounds):
        rates.setdefault("busy", []).append(contest.busy_tokens_per_s())
        for name, way in contest.ways().items():
            started = contest.clock()
            made = way()
            rates.setdefault(name, []).append(made / (contest.clock() - started))
        rates["busy"].append(contest.busy_tokens_per_s())
    return {name: statistics.median(values) for name, values in rates.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="generation", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rows, one round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--hidden", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--rows", type=int, default=None, help="decoded together")
    parser.add_argument("--batches", type=int, default=None, help="the job: so many samples for each row")
    parser.add_argument("--cpu-time", action="store_true", help="per second of processor time: for a busy machine")
    parser.add_argument("--rounds", type=int, default=None)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    on_gpu = options.device.startswith("cuda")
    hidden = options.hidden or (64 if options.quick else 1024 if on_gpu else 256)
    layers = options.layers or (1 if options.quick else 16 if on_gpu else 4)
    rows = options.rows or (16 if options.quick else 128 if on_gpu else 32)
    batches = options.batches or (3 if options.quick else 8)
    rounds = options.rounds or (1 if options.quick else 3)
    alphabet = (string.ascii_letters + string.digits)[: MEAN_TOKENS - SPECIAL_TOKENS]
    model = TinyLanguageModel(alphabet=alphabet, hidden_size=hidden, layers=layers, heads=4, max_positions=2048)
    policy = build(model)
    assert isinstance(policy, LanguagePolicy)
    module: Any = policy.module
    assert module.config.vocab_size == MEAN_TOKENS
    with torch.no_grad():
        module.get_output_embeddings().weight.mul_(1e-3)
    policy.module.to(options.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    console = Console(width=120)
    size = f"{policy.parameter_count() / 1e6:.1f}M parameters, {layers} layers, {rows} rows, {options.device}"
    figures = []
    workloads = {"one turn": (1, 0.0), "three turns": (3, 0.0), "three turns, replies take 10 ms": (3, 0.01)}
    if options.quick:
        del workloads["three turns"]
    for name, (turns, reply_s) in workloads.items():
        table = Table(title=f"{name}: {size}")
        for column in ("ours", "tokens/s", "against", "tokens/s", "ratio"):
            table.add_column(column, justify="right" if column in ("tokens/s", "ratio") else "left")
        contest = Contest(policy, rows, turns, reply_s, batches)
        if options.cpu_time:
            contest.clock = time.process_time
        rates = measure(contest, rounds)
        for ours, peer, peer_name in (
            ("continuous", "static", "static batches"),
            ("continuous", "library", "transformers generate"),
            ("continuous", "busy", "all rows busy"),
            ("static", "library", "transformers generate"),
        ):
            ratio = rates[ours] / rates[peer]
            table.add_row(ours, f"{rates[ours]:,.0f}", peer_name, f"{rates[peer]:,.0f}", f"{ratio:.2f}")
            figures.append(
                {
                    "name": f"{name}: {ours}",
                    "unit": "tokens/s",
                    "ours": rates[ours],
                    "peer": rates[peer],
                    "peer_name": peer_name,
                    "ratio": ratio,
                }
            )
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
