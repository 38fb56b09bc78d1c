"""Whole runs whose weights travel by other ways than files, with a process killed in the middle of a transfer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import Running, letters, start, trained_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MINE = """
import os
import signal
from pathlib import Path
from penstock.envs.tasks import Copy
from penstock.weights.io import collective, pull

HERE = Path(__file__).parent

class Mine(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed)

def note(name, line):
    with (HERE / name).open("a") as file:
        file.write(line + "\\n")

def die_once(victim, why):
    try:
        (HERE / f"witness-{victim}").open("x").write(why)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
"""

PULLING = """
send = pull.ArtifactServer._send

def sending(self, connection, offered, bucket, offset, length):
    if self.served_bytes > 400_000 and not (HERE / "witness-trainer").exists():
        connection.sendall(pull.REPLY.pack(pull.OK, length))
        with open(offered.source.fileno(bucket), "rb", closefd=False) as file:
            connection.sendfile(file, offset, max(1, length // 2))
        die_once("trainer", f"{length // 2} bytes into an answer of {length}")
    note("served", str(length))
    return send(self, connection, offered, bucket, offset, length)

pull.ArtifactServer._send = sending
"""

BROADCASTING = """
broadcast = collective.Group.broadcast

def taking_part(self, flat, timeout_s):
    invitation = self._invitation
    version = int(invitation.name.split("-")[1])
    if version >= 3 and invitation.rank > 0:
        die_once("rollout", str(version))
    if version >= 12 and invitation.rank == 0:
        die_once("trainer", str(version))
    broadcast(self, flat, timeout_s)
    if invitation.rank > 0:
        note("received", f"{version} {invitation.size}")

collective.Group.broadcast = taking_part
"""


def begin(folder: Path, code: str, transport: str, steps: int) -> Running:
    (folder / "mine.py").write_text(MINE + code)
    config = letters(
        folder,
        steps=steps,
        run=f'extra_path = ["{folder}"]',
        rollout="workers = 2",
        checkpoint_every=4,
        extra=f'[pipeline.weights]\ntransport = "{transport}"\n',
    )
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    return start(folder, config)


def end_well(run: Running, folder: Path, steps: int, victims: set[str]) -> None:
    """The run goes on after these deaths and no others, and does not take the replicas for the culprits."""
    code, output = run.end(240)
    assert {path.name.removeprefix("witness-") for path in folder.glob("witness-*")} == victims
    assert code == 0, output + run.logs()
    assert trained_steps(run.directory) == steps
    assert "all replicas are restarted" not in run.logs()
    log = (run.directory / "logs" / "supervisor.log").read_text()
    ended = re.findall(r"letters\.(trainer|rollout)\S* ended \((.*?)\)", log)
    assert sorted(ended) == sorted((victim, "killed by SIGKILL") for victim in victims)


def test_weights_are_pulled_and_the_trainer_dies_in_the_middle_of_an_answer(folder: Path):
    end_well(begin(folder, PULLING, "pull", 16), folder, 16, {"trainer"})
    assert (folder / "served").read_text()


def test_weights_are_broadcast_and_first_a_replica_then_the_trainer_dies_in_the_group(folder: Path):
    end_well(begin(folder, BROADCASTING, "broadcast", 24), folder, 24, {"rollout", "trainer"})
    received = [tuple(map(int, line.split())) for line in (folder / "received").read_text().splitlines()]
    assert any(size == 3 for _, size in received), "no broadcast reached both replicas at once"
    last_death = int((folder / "witness-trainer").read_text())
    assert any(version > last_death for version, _ in received), "nothing was broadcast after the deaths"
