"""TRL's side of `rewards.py`, run by an interpreter that has TRL. The last line of its output: when each step ended."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def reward_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("rewards", Path(__file__).with_name("rewards.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class Times(TrainerCallback):
    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.at.append(time.time())


def main() -> None:
    asked = json.loads(sys.argv[1])
    samples = asked["groups"] * 8
    prompts = ["".join(chr(97 + (number * 7 + place) % 26) for place in range(7)) + ">" for number in range(4096)]
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=samples,
            num_generations=8,
            max_completion_length=asked["tokens"],
            max_steps=asked["steps"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            beta=0.0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(asked["model"]),
            processing_class=AutoTokenizer.from_pretrained(asked["model"]),
            reward_funcs=reward_of(asked["reward"]),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[times],
        )
        trainer.train()
    print(json.dumps(times.at))


if __name__ == "__main__":
    main()
