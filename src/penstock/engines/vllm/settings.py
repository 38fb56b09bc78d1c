"""`[pipeline.engine]` with `kind = "vllm"`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import field_validator

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import Positive, Seconds

OWNED_FLAGS = {
    "--model": "[pipeline.model]",
    "--dtype": "model.dtype",
    "--max-model-len": "engine.max_length",
    "--max-num-seqs": "engine.max_requests",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--data-parallel-size": "engine.data_parallel",
    "--enforce-eager": "engine.eager",
    "--seed": "run.seed",
    "--enable-lora": "[pipeline.lora]",
    "--max-lora-rank": "lora.rank",
    **dict.fromkeys(
        (
            *("--max-loras", "--max-cpu-loras", "--load-format", "--weight-transfer-config", "--worker-extension-cls"),
            *("--worker-cls", "--quantization", "--hf-overrides", "--hf-config-path", "--revision", "--config-format"),
            *("--logprobs-mode", "--generation-config", "--override-generation-config", "--logits-processors"),
            *("--tokenizer", "--skip-tokenizer-init", "--enable-scale-out", "--enable-sleep-mode"),
            *("--uds", "--host", "--port", "--api-key", "--root-path", "--ssl-keyfile", "--ssl-certfile"),
            *("--served-model-name", "--config"),
        ),
        "",
    ),
}
"""Flags of the server on which the samples or the calls to it depend, and the keys that set them."""
OWNED_LETTERS = ("-tp", "-dp", "-q")


class VllmEngineSection(EngineSection):
    """A vLLM server that the worker starts and owns. Its weights are always updated in place."""

    REQUESTS_KEY: ClassVar[str] = "max_requests"
    kind: Literal["vllm"] = "vllm"
    """Chooses this table."""
    python: str = ""
    """The Python of an environment with vLLM and this package; empty: the one that runs Penstock."""
    max_requests: Positive = 64
    """Completions decoded together; the others wait in the server."""
    max_length: Positive | None = None
    """Tokens of the longest context; the model's own limit by default."""
    tensor_parallel: Positive = 1
    """GPUs over which one copy of the model is divided."""
    data_parallel: Positive = 1
    """Copies of the model in one server, each on its own `tensor_parallel` GPUs, with its own `max_requests`."""
    cache_gb: Positive = 1
    """GiB for keys and values on CPU. On a GPU the server takes its share of the device: see its own flags."""
    eager: bool = False
    """No compiled graphs: the server starts much sooner and decodes slower."""
    options: list[str] = []
    """Further flags of the server, for example `["--gpu-memory-utilization", "0.5"]`. Those on which the samples depend
    are refused."""
    start_s: Seconds = 600.0
    """How long the server may take until it answers."""
    stall_s: Seconds = 120.0
    """A server that does not answer for this long is replaced, and its worker with it."""
    request_s: Seconds = 1800.0
    """How long one completion may take, pauses included."""

    @field_validator("options")
    @classmethod
    def _others(cls, options: list[str]) -> list[str]:
        for option in options:
            owned = owned_flag(option)
            if owned:
                instead = f"; set {OWNED_FLAGS[owned]}" if OWNED_FLAGS.get(owned) else ""
                raise ValueError(
                    f"engine.options: {option!r} belongs to Penstock, because the samples or the calls to the server "
                    f"depend on {owned}{instead}"
                )
        return options

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(weights="files", device_weights=True, tensor_parallel=True, adapters=True)

    @property
    def needs(self) -> tuple[str, str] | None:
        return None if self.python else ("engine.kind = 'vllm' without engine.python", "vllm")

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def requests_at_once(self) -> int:
        return self.max_requests * self.data_parallel

    @property
    def starting_s(self) -> float:
        return self.start_s


def owned_flag(option: str) -> str:
    """The flag of `OWNED_FLAGS` that this argument sets in any spelling that the server accepts; empty if it sets none.

    The server accepts underscores, unambiguous beginnings, `--no-flag`, and `--flag.key` for a part of its value.
    """
    if not option.startswith("--"):
        return next((letters for letters in OWNED_LETTERS if option.startswith(letters)), "")
    name = option.partition("=")[0].partition(".")[0].replace("_", "-")
    names = {name, f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name}
    return next((flag for flag in OWNED_FLAGS if any(flag.startswith(one) for one in names)), "")
