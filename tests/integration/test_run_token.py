"""What a run in real processes shows of its token."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest
from running import Running, letters, start, trained_steps

from penstock.runtime.rundir import RunDir

pytestmark = pytest.mark.timeout(180)


def seen_of(run: Running) -> str:
    """All that files of the run, command lines and environments show."""
    files = [path.read_bytes() for path in run.directory.rglob("*") if path.is_file()]
    shown = []
    for process in [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]:
        shown += [*process.cmdline(), *process.environ().values()]
    return "\n".join([*shown, *(file.decode("latin-1") for file in files)])


@pytest.mark.parametrize("preload", [True, False])
def test_a_live_run_shows_its_token_nowhere_and_a_resumed_one_has_another(folder: Path, preload: bool):
    extra = f"[launch]\npreload = {str(preload).lower()}\n"
    run = start(folder, letters(folder, steps=10_000, rollout="ranks = 2", extra=extra))
    run.wait_for_step(1)
    first = RunDir.open(run.directory).token()
    assert len(first) > 32
    assert first not in seen_of(run)
    run.interrupt()
    assert run.end(60)[0] == 130
    (run.directory / "token").write_text("of a stranger" + "x" * 32)
    again = start(folder, "--resume", run.directory)
    again.wait_for_step(trained_steps(run.directory))
    second = RunDir.open(run.directory).token()
    assert second != first
    endpoint = RunDir.open(run.directory).read_endpoint()
    assert endpoint is not None
    for token, code in [(second, 200), (first, 401), ("of a stranger" + "x" * 32, 401)]:
        reply = httpx.get(f"{endpoint.url}/v1/status", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        assert reply.status_code == code, token
    again.interrupt()
    assert again.end(60)[0] == 130
