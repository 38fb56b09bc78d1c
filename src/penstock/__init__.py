"""Penstock: a runtime for asynchronous reinforcement-learning post-training.

What a user's own code imports:

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

Named as `my_task:Shout` in a configuration, `penstock run` trains the same. A whole workload is a class with the five
hooks of `Workload`, whose `postprocess` returns a `Finished` or `Failed` per sample.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.envs.protocol import ConversingEnvironment, Message, Prompt, TextEnvironment
    from penstock.errors import ConfigError, PenstockError, RunFailed
    from penstock.launch.python import Run, train
    from penstock.rollout.hooks import Failed, Finished, Unusable, Workload

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "ConversingEnvironment",
    "Failed",
    "Finished",
    "Message",
    "PenstockError",
    "Prompt",
    "Run",
    "RunFailed",
    "TextEnvironment",
    "Unusable",
    "Workload",
    "__version__",
    "train",
]

_HOMES = {
    "penstock.envs.protocol": ("ConversingEnvironment", "Message", "Prompt", "TextEnvironment"),
    "penstock.errors": ("ConfigError", "PenstockError", "RunFailed"),
    "penstock.launch.python": ("Run", "train"),
    "penstock.rollout.hooks": ("Failed", "Finished", "Unusable", "Workload"),
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: every small process imports this package, few need numpy."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
