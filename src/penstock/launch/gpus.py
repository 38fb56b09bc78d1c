"""The GPUs of this machine: which process may use which, and how busy they are. Without a driver: nothing."""

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
"""GPUs less busy than this belong to others, or to none."""


def gpus_here() -> tuple[str, ...]:
    """Those that the run may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    chosen, driver = os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    if chosen is not None:
        return tuple(filter(None, chosen.split(",")))
    if driver is None:
        return ()
    query = [driver, "--query-gpu=index", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return tuple(said.stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the driver does not say which GPUs there are, so processes share the first: %s", error)
        return ()


def seen_by(spec: ProcessSpec, config: Config, gpus: Sequence[str]) -> dict[str, str]:
    """Variables for the process's environment, so that it finds its own GPUs only. It finds all of them where a pool
    gives them out, and where the configuration names one by its number."""
    pipeline = next((one for one in config.pipeline if one.name == spec.pipeline), None)
    if pipeline is None or len(gpus) < 2:
        return {}
    how_many = {GPUS_VARIABLE: str(len(gpus))}
    if spec.role == "trainer":
        name, own = pipeline.train.device, trains_on(config, pipeline, len(gpus))
    else:
        name, own = pipeline.rollout.device, generates_on(config, pipeline, len(gpus), spec.index)
    if config.pool.devices or name not in ("auto", "cuda"):
        return how_many
    return how_many | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[int(gpu)] for gpu in dict.fromkeys(own))}


class GpuWatch:
    """Samples while it is entered."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.samples: list[tuple[float, dict[int, float]]] = []
        """When, and which share of the last moments each GPU was busy."""
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
        """The mean share of each GPU that did something since that time of the clock on the wall."""
        shares: dict[int, list[float]] = {}
        for at, sample in self.samples:
            for gpu, share in sample.items() if at >= since else ():
                shares.setdefault(gpu, []).append(share)
        means = {gpu: statistics.mean(all_of_it) for gpu, all_of_it in shares.items()}
        return {gpu: share for gpu, share in means.items() if share > IDLE}

    def _watch(self) -> None:
        driver = shutil.which("nvidia-smi")
        while driver is not None and not self._over.wait(self._every_s):
            try:
                said = subprocess.run([driver, *QUERY], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
                rows = [line.split(",") for line in said.stdout.splitlines() if line.strip()]
                self.samples.append((time.time(), {int(gpu): float(share) / 100 for gpu, share in rows}))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                log.info("the GPUs cannot be asked how busy they are: %s", error)
                return
