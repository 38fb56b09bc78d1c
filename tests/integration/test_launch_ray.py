"""`penstock run --launcher ray` on real clusters of nodes on this machine; skipped where Ray is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import left_behind, letters, start, step_lines, trained_steps, wait_for
from test_kill_matrix import assert_exact, finite

from penstock.payload.io.leftovers import sweep
from penstock.runtime.rundir import RunDir

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'penstock-rl[ray]'", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODES = Path(__file__).parent / "ray_nodes.py"


class RayNodes:
    """A cluster; its raylets are the children of another process, as those of a real one are."""

    def __init__(self, *cpus: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(NODES), *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        facts = self._read()
        self.address: str = facts["address"]
        self.raylets: list[int] = facts["raylets"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def left(self) -> dict[str, Any]:
        """The actors and placement groups that there are at present."""
        assert self.process.stdin is not None
        self.process.stdin.write("left\n")
        self.process.stdin.flush()
        return self._read()

    def node_of(self, process: psutil.Process) -> int:
        """The raylet below which the process is."""
        return next(parent.pid for parent in process.parents() if parent.pid in self.raylets)

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture
def nodes() -> Iterator[Callable[..., RayNodes]]:
    made: list[RayNodes] = []

    def make(*cpus: int) -> RayNodes:
        made.append(RayNodes(*cpus))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def roles(folder: Path) -> dict[str, psutil.Process]:
    """The processes of the run by name, wherever they are."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "penstock.roles" in arguments and any(str(folder) in argument for argument in arguments):
            found[arguments[arguments.index("--name") + 1]] = process
    return found


def role(folder: Path, name: str, timeout_s: float = 60, *, other_than: int = 0) -> psutil.Process:
    def found() -> psutil.Process | None:
        process = roles(folder).get(name)
        return process if process is not None and process.pid != other_than else None

    return wait_for(found, timeout_s, f"a process {name} other than {other_than}")


def on(cluster: RayNodes) -> tuple[str, ...]:
    return ("--launcher", "ray", "--set", f"launch.address={cluster.address}")


def assert_nothing_left(cluster: RayNodes, folder: Path) -> None:
    wait_for(lambda: cluster.left() == {"actors": [], "groups": []}, 30, "all actors and placement groups to go")
    assert left_behind(folder) == []


@pytest.mark.parametrize("lost", ["letters.trainer", "controller"])
def test_a_run_outlives_a_worker_a_whole_node_and_its_launcher_with_exact_books(
    folder: Path, nodes: Callable[..., RayNodes], lost: str
):
    cluster = nodes(0, 4, 4)  # no process is on the head: without the head there is no cluster
    run = start(folder, finite(folder, prompts=600, rollout="workers = 2"), *on(cluster))
    run.wait_for_step(2, timeout_s=180)
    worker = role(folder, "letters.rollout.0")
    worker.kill()
    role(folder, "letters.rollout.0", other_than=worker.pid)
    run.process.kill()
    run.process.communicate(timeout=10)
    watching = start(folder, run.directory, command="attach")
    before = role(folder, lost)
    node = cluster.node_of(before)
    neighbours = [process for process in roles(folder).values() if cluster.node_of(process) == node]
    os.kill(node, signal.SIGKILL)
    for process in neighbours:
        wait_for(lambda process=process: not process.is_running(), 15, f"{process} to end with its node")
    again = role(folder, lost, 120, other_than=before.pid)
    assert cluster.node_of(again) != node
    code, output = watching.end(300)
    assert_exact(run, code, output, prompts=600)
    assert f"{lost} ended (its place on node" in output
    assert "complete after" in output
    assert_nothing_left(cluster, folder)


def test_a_lost_supervisor_comes_back_and_terminals_come_and_go(folder: Path, nodes: Callable[..., RayNodes]):
    cluster = nodes(4)
    run = start(folder, letters(folder, steps=5000, checkpoint_every=2), *on(cluster))
    run.wait_for_step(4, timeout_s=180)
    controller = role(folder, "controller")
    (supervisor,) = [one for one in psutil.process_iter(["name"]) if one.info["name"].startswith("ray::RunActor")]
    supervisor.kill()
    role(folder, "controller", 120, other_than=controller.pid)
    run.wait_for_step(8, timeout_s=120)

    watching = start(folder, run.directory, command="attach")
    assert watching.process.stdout is not None
    assert watching.process.stdout.readline() == "watching the run; Ctrl-C leaves it running\n"
    watching.interrupt()
    code, output = watching.end(60)
    assert code == 0, output
    assert "the run continues" in output
    assert run.process.poll() is None

    code, output = start(folder, run.directory, "--stop", command="attach").end(120)
    assert code == 130, output
    code, output = run.end(60)
    assert code == 130, output
    assert "the supervisor was lost and started again" in output

    steps = trained_steps(run.directory) + 3
    code, output = start(folder, "--resume", run.directory, "--set", f"pipeline.letters.steps={steps}").end(300)
    assert code == 0, output
    assert {entry["step"] for entry in step_lines(run.directory)} == set(range(steps))
    assert start(folder, run.directory, command="attach").end(60)[0] == 0, "how it ended can still be seen"
    assert_nothing_left(cluster, folder)


def test_without_a_cluster_the_run_has_a_ray_of_its_own_that_ends_with_it(folder: Path):
    two_ranks = ["--set", "pipeline.letters.train.ranks=2"]  # below the trainer, in the one place that it was given
    run = start(folder, letters(folder, steps=500), "--launcher", "ray", *two_ranks)
    run.wait_for_step(2, timeout_s=180)
    assert (run.directory / "logs" / "letters.trainer.rank1.log").exists()
    below = psutil.Process(run.process.pid).children(recursive=True)
    run.interrupt()
    code, output = run.end(120)
    assert code == 130, output
    assert "a local Ray on this machine" in output
    assert "penstock run --resume" in output
    for process in below:
        wait_for(lambda process=process: not process.is_running(), 30, f"{process} to end")


def test_what_the_cluster_cannot_give_is_said_and_nothing_is_kept(folder: Path, nodes: Callable[..., RayNodes]):
    cluster = nodes(2)
    config = letters(folder, steps=5, rollout="workers = 3\nthreads = 2")
    code, output = start(folder, config, *on(cluster), "--set", "launch.wait_s=2").end(180)
    assert code == 1, output
    assert "no place within 2 s for 3 x letters.rollout of 2 CPUs" in output
    assert "with 2 CPUs" in output
    assert "What to do: " in output
    assert_nothing_left(cluster, folder)

    code, output = start(folder, config, "--launcher", "ray", "--set", "launch.address=127.0.0.1:1").end(60)
    assert code == 2, output
    assert "no Ray cluster answers at '127.0.0.1:1'" in output
    assert len(list((folder / "runs").iterdir())) == 1, "nothing was made for a run that cannot begin"


def test_after_the_loss_of_the_head_node_the_user_is_told_how_to_go_on(folder: Path, nodes: Callable[..., RayNodes]):
    cluster = nodes(0, 4)
    run = start(folder, letters(folder, steps=100_000, rollout="workers = 2"), *on(cluster))
    run.wait_for_step(2, timeout_s=180)
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        if process.name() == "gcs_server" or process.pid == cluster.raylets[0]:
            process.kill()
    code, output = run.end(240)
    assert code == 1, output
    assert f"penstock run --resume {run.directory}" in output
    wait_for(lambda: not left_behind(folder), 180, "all processes to end with the cluster")
    assert sweep(RunDir.open(run.directory).run_id), "the process that removes rings ended with the cluster"


def test_a_log_that_never_ends_does_not_delay_the_end_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from penstock.config.load import dump, load
    from penstock.launch import ray_placer

    config = load(letters(tmp_path))
    run = RunDir.create(tmp_path, "run", dump(config), "0")
    placer = ray_placer.RayPlacer(run, config, print)
    copied, cleared = [], []

    async def exchange() -> bool:
        copied.append(1)
        await asyncio.sleep(0.001)
        return True

    async def clear(*_: Any) -> None:
        cleared.append(1)

    monkeypatch.setattr(ray_placer, "LAST_LOGS_S", 0.05)
    monkeypatch.setattr(ray_placer, "clear", clear)
    monkeypatch.setattr(placer, "_exchange", exchange)
    asyncio.run(placer.close())
    assert copied
    assert cleared
