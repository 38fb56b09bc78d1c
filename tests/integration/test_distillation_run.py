"""`penstock run` with a teacher: the student's samples come to be what the teacher finds probable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from running import letters, start, step_lines

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.envs.tasks import Copy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 24


def write_teacher(directory: Path, alphabet: str) -> None:
    """Larger than the student, and with opinions."""
    policy = build(TinyLanguageModel(alphabet=alphabet, hidden_size=64, heads=2, seed=7))
    assert isinstance(policy, LanguagePolicy)
    with torch.no_grad():
        policy.module.get_output_embeddings().weight.mul_(25.0)  # type: ignore[operator]
    policy.module.save_pretrained(directory)  # type: ignore[operator]
    policy.tokenizer.save(directory)


def distilling(folder: Path, alphabet: str) -> Path:
    write_teacher(folder / "teacher", alphabet)
    extra = "[pipeline.token_loss]\nentropy_coefficient = 0.0\n[pipeline.optimizer]\nlearning_rate = 0.01\n"
    config = letters(folder, steps=STEPS, extra=extra)
    train = "[pipeline.train]\n"
    text = config.read_text()
    assert train in text
    config.write_text(text.replace(train, f'{train}loss = "distill"\nteacher = "teacher"\n'))
    return config


def test_the_divergence_falls(folder: Path):
    code, output = start(folder, distilling(folder, Copy().alphabet)).end(200)
    assert code == 0, output
    (directory,) = (folder / "runs").iterdir()
    distances = [line["kl_teacher"] for line in step_lines(directory)]
    assert len(distances) == STEPS
    assert np.mean(distances[-4:]) < 0.5 * np.mean(distances[:4])


def test_a_teacher_of_another_vocabulary_ends_the_run_with_a_sentence(folder: Path):
    code, output = start(folder, distilling(folder, "xyz>")).end(120)
    assert code != 0
    assert "is not the student's of" in output
