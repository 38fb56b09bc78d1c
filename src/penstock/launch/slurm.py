"""A batch script that runs a configuration on Slurm: on one node, or on a Ray cluster that the job starts.

The script resumes: a job that is requeued continues the run that it started. Before the time limit Slurm sends SIGTERM
to the script, which forwards it; the run then saves a checkpoint and shuts down gracefully.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from penstock.config.run import Config
from penstock.errors import ConfigError

NOTICE_S = 120
"""Seconds before the time limit at which the run is stopped: longer than a checkpoint takes."""

_HEADER = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --time={time}
#SBATCH --signal=B:TERM@{notice}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
{options}
set -u
runs={directory}
state="$runs/slurm-${{SLURM_JOB_ID:-local}}"
mkdir -p "$runs"
"""

_RAY = """
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=6379
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --port="$port" --block &
for attempt in $(seq 60); do ray status --address="$head:$port" > /dev/null 2>&1 && break; sleep 1; done
srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) -x "$head" ray start --address="$head:$port" --block &
export RAY_ADDRESS="$head:$port"
"""

_RUN = """
if [ -s "$state" ]; then
  {penstock} run --resume "$(cat "$state")" & run=$!
else
  {penstock} run {config} --set run.dir="$runs" {arguments} \\
    > >(tee >(awk '/^run directory: / && !seen {{seen = 1; print substr($0, 16); fflush()}}' > "$state")) & run=$!
fi
trap 'kill -TERM $run' TERM
wait $run; code=$?
if [ $code -gt 128 ]; then wait $run; code=$?; fi   # the first wait ended with the signal
exit $code
"""


def batch_script(
    path: Path,
    config: Config,
    overrides: Sequence[str] = (),
    *,
    nodes: int = 1,
    time: str = "1-00:00:00",
    options: Sequence[str] = (),
    penstock: str = "penstock",
) -> str:
    """The script for `sbatch`. `options` are additional Slurm options, such as `--gpus-per-node=8`."""
    if nodes < 1:
        raise ConfigError(f"--nodes is {nodes}; a job needs at least one")
    if nodes == 1 and config.launch.kind == "ray":
        raise ConfigError("launch.kind is 'ray' on one node: use --nodes 2 or more, or launch.kind = 'local'")
    chosen = [*overrides, "launch.kind=ray"] if nodes > 1 else list(overrides)
    header = _HEADER.format(
        name=config.run.name,
        nodes=nodes,
        time=time,
        notice=NOTICE_S,
        options="".join(f"#SBATCH {option}\n" for option in options),
        directory=shlex.quote(str(config.run.dir.resolve())),
    )
    arguments = " ".join(f"--set {shlex.quote(override)}" for override in chosen)
    run = _RUN.format(config=shlex.quote(str(path.resolve())), arguments=arguments, penstock=penstock)
    return header + (_RAY if nodes > 1 else "") + run
