"""Seconds from return to the first step and to a reward of 0.95, beside TRL: same task, model and hyperparameters.

A tiny Llama with random weights learns to copy four letters on a CPU. Both start from nothing, as a user would start
them: `penstock run run.toml` beside `python train.py` with TRL's `GRPOTrainer`. Both read the same model directory and
train with the same groups, learning rate, clipping and entropy bonus; TRL generates and trains by turns, Penstock at
the same time with samples up to two versions old. They take turns, so that both meet the same noise. A reward is
reached when the mean of ten steps is above it.

TRL wants an environment of its own: `python -m venv trl && trl/bin/pip install trl`, then
`penstock bench vs_trl --trl trl/bin/python`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.runtime.interpreter import python_command

GROUPS, GROUP_SIZE, TOKENS = 16, 8, 4
LEARNING_RATE, WARMUP_STEPS, ENTROPY = 2e-3, 5, 0.12
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
WINDOW = 10
POLL_S = 0.02
END_S = 30.0

PENSTOCK = f"""
[run]
name = "letters"
dir = {{folder}}
seed = {{seed}}
[[pipeline]]
name = "letters"
steps = {{steps}}
[pipeline.env]
name = "copy"
[pipeline.model]
kind = "path"
path = {{model}}
[pipeline.rollout]
group_size = {GROUP_SIZE}
batch_samples = {GROUPS * GROUP_SIZE}
max_new_tokens = {TOKENS}
[pipeline.train]
groups_per_step = {GROUPS}
[pipeline.token_loss]
clip_low = {CLIP_LOW}
clip_high = {CLIP_HIGH}
entropy_coefficient = {ENTROPY}
[pipeline.optimizer]
learning_rate = {LEARNING_RATE}
warmup_steps = {WARMUP_STEPS}
schedule = "linear"
final_fraction = 0.0
beta2 = 0.95
[pipeline.checkpoint]
every_steps = 1000
"""

TRL = f"""
import json, sys, time
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, prompts, lines, seed, steps = sys.argv[1:]

def positions(completions, answer, **columns):
    return [
        sum(a == b for a, b in zip(given, right)) / max(len(given), len(right))
        for given, right in zip(completions, answer)
    ]

class Lines(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **other):
        if "reward" in logs:
            with open(lines, "a") as file:
                file.write(json.dumps({{"kind": "step", "at": time.time(), "reward": logs["reward"]}}) + "\\n")

config = GRPOConfig(
    output_dir=lines + ".trl", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=int(seed),
    per_device_train_batch_size={GROUPS * GROUP_SIZE}, gradient_accumulation_steps=1,
    num_generations={GROUP_SIZE}, max_completion_length={TOKENS}, max_steps=int(steps),
    learning_rate={LEARNING_RATE}, lr_scheduler_type="linear", warmup_steps={WARMUP_STEPS},
    adam_beta2=0.95, weight_decay=0.0, loss_type="dapo", epsilon={CLIP_LOW}, epsilon_high={CLIP_HIGH},
    entropy_coef={ENTROPY}, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=model, reward_funcs=positions, args=config, callbacks=[Lines()],
    train_dataset=Dataset.from_list(json.load(open(prompts))),
)
trainer.train()
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds from the start of the command; `reached` is None when the steps ran out before."""

    first_step: float
    reached: float | None
    steps: int
    step_s: float


def make_model(folder: Path) -> tuple[Path, Path]:
    """A model directory that both open, and prompts of the same task as rows."""
    from transformers.utils import logging

    from penstock.engines.models import TinyLanguageModel, build
    from penstock.envs.tasks import Copy

    logging.disable_progress_bar()

    task, directory = Copy(), folder / "model"
    policy = build(TinyLanguageModel(alphabet=task.alphabet, max_positions=128))
    model: Any = policy.module
    model.save_pretrained(directory)
    policy.save_config(directory)
    drawn = [task.prompt(position) for position in range(4096)]
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": one.text, "answer": one.columns["answer"]} for one in drawn]))
    return directory, prompts


def timed(command: Sequence[str], lines: Path, target: float, environment: dict[str, str], log: Path) -> Timed:
    """Starts the command, follows the steps that it writes, and interrupts it when the reward is reached."""
    began = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        rewards: list[float] = []
        at: list[float] = []
        while True:
            ended = process.poll() is not None
            found = sorted(Path(lines.anchor).glob(str(lines.relative_to(lines.anchor))))
            text = found[0].read_text() if found else ""
            entries = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            steps = [entry for entry in entries if entry["kind"] == "step"]
            rewards, at = [step["reward"] for step in steps], [step["at"] - began for step in steps]
            reached = next((end for end in range(WINDOW, len(at) + 1) if mean_of(rewards, end) >= target), None)
            if reached is not None or ended:
                break
            time.sleep(POLL_S)
    finally:
        end(process)
    if not at:
        raise SystemExit(f"{' '.join(command[:4])} … made no step:\n{log.read_text()[-2000:]}")
    count = reached or len(at)
    step_s = (at[count - 1] - at[0]) / max(1, count - 1)
    return Timed(at[0], None if reached is None else at[reached - 1], count, step_s)


def mean_of(rewards: Sequence[float], end: int) -> float:
    return statistics.mean(rewards[end - WINDOW : end])


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ours(folder: Path, model: Path, round_: int, options: argparse.Namespace) -> Timed:
    folder.mkdir()
    path = folder / "run.toml"
    values = {"folder": json.dumps(str(folder / "runs")), "model": json.dumps(str(model))}
    path.write_text(PENSTOCK.format(**values, seed=round_, steps=options.steps))
    command = python_command("-m", "penstock.cli.entry", "run", str(path))
    return timed(command, folder / "runs" / "*" / "metrics.jsonl", options.reward, dict(os.environ), folder / "log")


def theirs(folder: Path, model: Path, prompts: Path, round_: int, options: argparse.Namespace) -> Timed:
    folder.mkdir()
    path, lines = folder / "train.py", folder / "lines.jsonl"
    path.write_text(TRL)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # nothing of ours
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.trl_threads)}
    command = [options.trl, str(path), str(model), str(prompts), str(lines), str(round_), str(options.steps)]
    return timed(command, lines, options.reward, environment, folder / "log")


def version_of_trl(python: str) -> str | None:
    """None when this interpreter has no TRL, or does not exist."""
    ask = "import importlib.metadata as m; print(m.version('trl'))"
    try:
        said = subprocess.run(
            python_command("-c", ask, interpreter=python), capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def figures_of(rounds: Sequence[tuple[Timed, Timed | None]], reward: float) -> list[dict[str, Any]]:
    """Medians over the rounds; a ratio above 1 says how many times sooner we are there."""

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known and len(known) == len(values) else None

    wanted = {
        "return to first step": lambda one: one.first_step,
        f"return to reward {reward:g}": lambda one: one.reached,
        "a step": lambda one: one.step_s,
        "steps": lambda one: float(one.steps),
    }
    figures: list[dict[str, Any]] = []
    for name, take in wanted.items():
        mine = median([take(one) for one, _ in rounds])
        peer = median([None if one is None else take(one) for _, one in rounds])
        ratio = None if mine is None or peer is None else peer / mine
        unit = "" if name == "steps" else "s"
        figures.append({"name": name, "unit": unit, "ours": mine, "peer": peer, "ratio": ratio})
    return figures


def shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}".strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="penstock bench vs_trl", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", metavar="PYTHON", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--trl-threads", type=int, default=1, help="of torch in TRL; Penstock has one in each process")
    parser.add_argument("--reward", type=float, default=0.95, help="to reach")
    parser.add_argument(
        "--steps", type=int, default=240, help="over which the learning rate falls, and after which to give up"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each, with a seed of its own; medians are shown")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    console = Console()
    trl = version_of_trl(options.trl)
    if trl is None:
        missing = f"TRL is missing: {options.trl} has no module trl; name an interpreter that has it with --trl"
        console.print(missing, markup=False, soft_wrap=True)
    rounds: list[tuple[Timed, Timed | None]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, prompts = make_model(folder)
        for round_ in range(1 if options.quick else options.rounds):
            mine = ours(folder / f"ours-{round_}", model, round_, options)
            peer = None if trl is None else theirs(folder / f"trl-{round_}", model, prompts, round_, options)
            rounds.append((mine, peer))
            told = "" if peer is None else f"; TRL {shown(peer.first_step, 's')}, {shown(peer.reached, 's')}"
            console.print(
                f"round {round_}: first step and reward: penstock {shown(mine.first_step, 's')}, "
                f"{shown(mine.reached, 's')}{told}; load {os.getloadavg()[0]:.1f}",
                highlight=False,
                soft_wrap=True,
            )
    figures = figures_of(rounds, options.reward)
    table = Table(title=f"copying letters on a CPU, medians of {len(rounds)}", title_justify="left")
    for heading in ("", "penstock", f"TRL {trl or 'missing'}", "times sooner"):
        table.add_column(heading, justify="left" if not heading else "right")
    for figure in figures:
        ratio = "-" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
        cells = (shown(figure["ours"], figure["unit"]), shown(figure["peer"], figure["unit"]))
        table.add_row(figure["name"], *cells, ratio)
    console.print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
