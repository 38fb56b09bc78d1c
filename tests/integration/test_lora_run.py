"""`penstock run` with an adapter: trained, published, checkpointed and exported alone, over a killed trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from running import letters, start, step_lines, wait_for

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.envs.tasks import Copy
from penstock.journal.reader import history
from penstock.records.weights import Manifest
from penstock.wire.messages import PublishWeights

pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 12
PROMPT = "abcd>"


def base(directory: Path) -> int:
    """Writes a small model; the bytes of its weights."""
    policy = build(TinyLanguageModel(alphabet=Copy().alphabet, hidden_size=32, layers=2, heads=2))
    assert isinstance(policy, LanguagePolicy)
    policy.module.save_pretrained(directory)  # type: ignore[operator]
    policy.tokenizer.save(directory)
    return sum(tensor.nbytes for tensor in policy.named_tensors().values())


def adapting(folder: Path) -> Path:
    tables = "[pipeline.lora]\nrank = 2\nalpha = 4.0\n[pipeline.optimizer]\nlearning_rate = 0.02\n"
    config = letters(folder, steps=STEPS, checkpoint_every=4, extra=tables)
    tiny = 'kind = "tiny"\nhidden = 32\nlayers = 1\nheads = 2\n'
    text = config.read_text()
    assert tiny in text
    config.write_text(text.replace(tiny, f'kind = "path"\npath = "{folder / "base"}"\n'))
    return config


def penstock(folder: Path, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def published(directory: Path) -> list[Manifest]:
    """The versions of a run."""
    bodies = (entry.body for entry in history(directory / "journal.sqlite"))
    found = [body for body in bodies if msgspec.msgpack.decode(body)["type"] == "publish_weights"]
    return [msgspec.msgpack.decode(body, type=PublishWeights).manifest for body in found]


def greedy(model: torch.nn.Module, tokenizer: object) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids  # type: ignore[operator]
    drawn = model.generate(ids, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    return tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)  # type: ignore[attr-defined]


def test_an_adapter_from_a_run_with_a_killed_trainer_to_a_model(folder: Path):
    base_bytes = base(folder / "base")
    run = start(folder, adapting(folder))
    run.wait_for_step(5)
    trainer = run.child("letters.trainer")
    trainer.send_signal(signal.SIGKILL)
    wait_for(lambda: run.child("letters.trainer").pid != trainer.pid, 60, "another trainer")
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    assert {entry["step"] for entry in step_lines(run.directory)} == set(range(STEPS))

    checkpoints = run.directory / "checkpoints" / "letters"
    saved = safetensors.torch.load_file(checkpoints / f"step-{STEPS:08d}" / "model.safetensors")
    assert all(".lora_" in name for name in saved)
    assert any(tensor.any() for name, tensor in saved.items() if ".lora_B" in name), "it starts at 0"
    adapter_bytes = sum(tensor.nbytes for tensor in saved.values())
    assert adapter_bytes < base_bytes / 4
    versions = published(run.directory)
    assert {manifest.version for manifest in versions} >= {0, STEPS}
    for manifest in versions:
        assert {spec.name for bucket in manifest.buckets for spec in bucket.tensors} == saved.keys()
        assert sum(bucket.size_bytes for bucket in manifest.buckets) < base_bytes / 4

    penstock(folder, "export", run.directory, "--to", "adapter")
    penstock(folder, "export", run.directory, "--to", "merged", "--merged")
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size < adapter_bytes * 2
    assert not (folder / "adapter" / "model.safetensors").exists()
    assert not (folder / "merged" / "adapter_config.json").exists()

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    named = json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), str(folder / "adapter"))
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-4)
    said = greedy(merged, tokenizer)
    assert greedy(adapted, tokenizer) == said
    options = ("--temperature", "0", "--max-new-tokens", "6")
    assert penstock(folder, "sample", run.directory, PROMPT, *options).strip("\n") == said
    assert penstock(folder, "sample", "merged", PROMPT, *options).strip("\n") == said
    assert "16 prompts, 16 samples" in penstock(folder, "eval", run.directory, "--prompts", "16")
    options = ("--env", "copy", "--prompts", "16", "--max-new-tokens", "4")
    measured = [penstock(folder, "eval", one, *options).splitlines()[-1] for one in (run.directory, "merged")]
    assert measured[0] == measured[1]


def test_two_ranks_train_an_adapter_together_and_one_goes_on(folder: Path):
    base(folder / "base")
    config = adapting(folder)
    keys = "[pipeline.train]\nranks = 2"
    text = config.read_text().replace("[pipeline.train]", keys).replace(f"steps = {STEPS}", "steps = 3")
    config.write_text(text + "[pipeline.token_loss]\nkl_coefficient = 0.01\n")
    run = start(folder, config)
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    for manifest in published(run.directory):
        assert all(".lora_" in spec.name for bucket in manifest.buckets for spec in bucket.tensors)
    overrides = ["--set", "pipeline.letters.steps=5", "--set", "pipeline.letters.train.ranks=1"]
    run = start(folder, "--resume", str(run.directory), *overrides)
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    lines = step_lines(run.directory)
    assert [entry["step"] for entry in lines] == [0, 1, 2, 3, 4]
    assert lines[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl_reference"] > 0
