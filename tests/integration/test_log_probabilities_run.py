"""`penstock run` compares the log-probabilities of engine and trainer before it trains on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import letters, start, step_lines

OTHER_TEMPERATURE = '''\
"""An engine that draws at half of the temperature that it is given."""

from typing import Any

from penstock.engines.torch.sampling import SamplingParams
from penstock.envs.tasks import Copy


class Cold(Copy):
    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        put = SamplingParams.put

        def put_half(self: SamplingParams, *given: Any) -> None:
            put(self, *given)
            if given[1][0].max_new_tokens == 4:  # of the run; the engine is tried out before it
                self.temperature_B[given[0]] *= 0.5

        SamplingParams.put = put_half
'''


def written(folder: Path, **options: str) -> Path:
    (folder / "cold.py").write_text(OTHER_TEMPERATURE)
    config = letters(folder, steps=2, run=f'extra_path = ["{folder}"]', **options)  # type: ignore[arg-type]
    config.write_text(config.read_text().replace('name = "copy"', 'name = "cold:Cold"'))
    return config


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_computes_something_else_ends_the_run_before_it_trains(folder: Path, ranks: int) -> None:
    config = written(folder)
    config.write_text(config.read_text().replace("[pipeline.train]", f"[pipeline.train]\nranks = {ranks}"))
    code, output = start(folder, config).end(100)
    assert code == 1
    said = " ".join(output.split())
    assert "engine and trainer disagree about samples that the weights of step 0 have drawn" in said, output
    for part in ("rounding in float32 explains 0.005", "temperature", "set train.check_logprobs = false"):
        assert part in said
    (directory,) = (folder / "runs").iterdir()
    assert not step_lines(directory)


@pytest.mark.slow
def test_a_key_switches_the_comparison_off(folder: Path) -> None:
    code, output = start(folder, written(folder), "--set", "pipeline.letters.train.check_logprobs=false").end(100)
    assert code == 0, output
    (directory,) = (folder / "runs").iterdir()
    lines = step_lines(directory)
    assert len(lines) == 2
    assert lines[0]["kl_sampling"] > 1e-3, "the engine did draw at another temperature"
    assert "engine_difference_mean" not in lines[0]


@pytest.mark.slow
def test_other_runs_record_the_difference_in_their_first_step(folder: Path) -> None:
    rollout = "top_p = 0.6\ntop_k = 12"
    code, output = start(folder, letters(folder, steps=2, rollout=rollout)).end(100)
    assert code == 0, output
    (directory,) = (folder / "runs").iterdir()
    first, second = step_lines(directory)
    assert 0 <= first["engine_difference_mean"] <= first["engine_difference_max"] < 1e-3
    assert "engine_difference_mean" not in second
