"""A run on a machine with several GPUs, or with a driver that says so: each process is started to see its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import letters, start

DRIVER = """\
#!/bin/sh
case "$*" in
*--query-gpu=index,*) echo "0, 0" ;;
*) printf '0\\n1\\n2\\n' ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, "5,6,7"])
def test_each_process_is_started_with_its_own_gpus(
    folder: Path, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = folder / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=":")
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    config = letters(folder, steps=200, rollout="workers = 2", extra="[launch]\npreload = false\n")
    run = start(folder, config)
    run.wait_for_step(1)
    processes = {name: process.environ() for name, process in run.children().items()}
    run.interrupt()
    code, output = run.end()
    assert code in (0, 130), output + run.logs()
    first, second, third = ("0", "1", "2") if chosen is None else chosen.split(",")
    assert {name: process.get("CUDA_VISIBLE_DEVICES") for name, process in processes.items()} == {
        "controller": chosen,
        "letters.trainer": first,
        "letters.rollout.0": second,
        "letters.rollout.1": third,
    }
    assert {process.get("PENSTOCK_GPUS") for name, process in processes.items() if name != "controller"} == {"3"}
