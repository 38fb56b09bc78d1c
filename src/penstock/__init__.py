"""Penstock: a runtime for asynchronous reinforcement-learning post-training.

Imports for user code:

    from penstock import Prompt

    class Shout:
        "An environment: answer in capitals."
        alphabet, count = "abcdABCD>", None

        def __init__(self, seed=0):
            self.seed = seed

        def prompt(self, position):
            letter = "abcd"[(position * 7 + self.seed) % 4]
            return Prompt(text=f"{letter}>", columns={"answer": letter.upper()})

        def score(self, prompts, completions, *, answer, **columns):
            return [float(given == right) for given, right in zip(completions, answer, strict=True)]

    run = penstock.train(environment=Shout, model="tiny", steps=60, rollout={"max_new_tokens": 1})
    for step in run:
        print(step["step"], step["reward"])

With the environment `my_task:Shout` in a configuration, `penstock run` trains the same. A custom workload is a class
with the five hooks of `Workload`; its `postprocess` returns a `Finished` or `Failed` per sample.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batch import advantage as advantages
    from penstock.envs.io.gymnasium import Spaces
    from penstock.envs.mixture import Mixture
    from penstock.envs.protocol import ConversingEnvironment, GoBack, Message, Prompt, TextEnvironment
    from penstock.envs.tools import WithTools
    from penstock.errors import ConfigError, PenstockError, RunFailed
    from penstock.launch.python import Run, train
    from penstock.records.prompt import PromptLease
    from penstock.rollout.hooks import Failed, Finished, Outcome, Unusable, Workload
    from penstock.train.losses import tokens as losses

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "ConversingEnvironment",
    "Failed",
    "Finished",
    "GoBack",
    "Message",
    "Mixture",
    "Outcome",
    "PenstockError",
    "Prompt",
    "PromptLease",
    "Run",
    "RunFailed",
    "Spaces",
    "TextEnvironment",
    "Unusable",
    "WithTools",
    "Workload",
    "__version__",
    "advantages",
    "losses",
    "train",
]

_HOMES = {
    "penstock.envs.io.gymnasium": ("Spaces",),
    "penstock.envs.mixture": ("Mixture",),
    "penstock.envs.protocol": ("ConversingEnvironment", "GoBack", "Message", "Prompt", "TextEnvironment"),
    "penstock.envs.tools": ("WithTools",),
    "penstock.errors": ("ConfigError", "PenstockError", "RunFailed"),
    "penstock.launch.python": ("Run", "train"),
    "penstock.records.prompt": ("PromptLease",),
    "penstock.rollout.hooks": ("Failed", "Finished", "Outcome", "Unusable", "Workload"),
}

_MODULES = {"advantages": "penstock.batch.advantage", "losses": "penstock.train.losses.tokens"}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: every small process imports this package, few need numpy."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Includes names that are not imported yet, for completion in a notebook."""
    return sorted({*globals(), *__all__})
