"""The GPUs of this machine: which process may use which, and their utilization. Empty without a driver."""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from penstock.config.devices import generates_on, trains_on
from penstock.config.run import Config
from penstock.launch.processes import ProcessSpec
from penstock.runtime.process import GPUS_VARIABLE

log = logging.getLogger(__name__)

QUERY = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")
EVERY_S = 2.0
TIMEOUT_S = 10.0
IDLE = 0.01
"""A GPU with a lower utilization is not used by this run."""


def gpus_here() -> tuple[str, ...]:
    """The GPUs that the run may use, named as in CUDA_VISIBLE_DEVICES."""
    chosen, driver = os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    if chosen is not None:
        return tuple(filter(None, chosen.split(",")))
    if driver is None:
        return ()
    query = [driver, "--query-gpu=index", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return tuple(output.stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi did not list the GPUs, so all processes use the first one: %s", error)
        return ()


def gpu_environment(spec: ProcessSpec, config: Config, gpus: Sequence[str]) -> dict[str, str]:
    """Environment variables that restrict the process to its own GPUs. It sees all GPUs if a pool assigns them, or if
    the configuration names a GPU by its number."""
    pipeline = next((one for one in config.pipeline if one.name == spec.pipeline), None)
    if pipeline is None or len(gpus) < 2:
        return {}
    count = {GPUS_VARIABLE: str(len(gpus))}
    if spec.role == "trainer":
        name, own = pipeline.train.device, trains_on(config, pipeline, len(gpus))
    else:
        name, own = pipeline.rollout.device, generates_on(config, pipeline, len(gpus), spec.index)
    if config.pool.devices or name not in ("auto", "cuda"):
        return count
    return count | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[int(gpu)] for gpu in dict.fromkeys(own))}


class GpuWatch:
    """Samples GPU utilization inside a `with` block."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.samples: list[tuple[float, dict[int, float]]] = []
        """The time of each sample, and the utilization of each GPU (0 to 1)."""
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpus", daemon=True)

    def __enter__(self) -> GpuWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(TIMEOUT_S)

    def busy(self, since: float = 0.0) -> dict[int, float]:
        """The mean utilization of each GPU that was used since that wall-clock time."""
        shares: dict[int, list[float]] = {}
        for at, sample in self.samples:
            for gpu, share in sample.items() if at >= since else ():
                shares.setdefault(gpu, []).append(share)
        means = {gpu: statistics.mean(values) for gpu, values in shares.items()}
        return {gpu: share for gpu, share in means.items() if share > IDLE}

    def _watch(self) -> None:
        driver = shutil.which("nvidia-smi")
        while driver is not None and not self._over.wait(self._every_s):
            try:
                output = subprocess.run([driver, *QUERY], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
                rows = [line.split(",") for line in output.stdout.splitlines() if line.strip()]
                self.samples.append((time.time(), {int(gpu): float(share) / 100 for gpu, share in rows}))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                log.info("the utilization of the GPUs cannot be read: %s", error)
                return
