"""Whether the torch engine draws from the distribution that a model's own code computes: tried out on a miniature."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from penstock.engines.architecture import TOLERANCE, logprobs_of, miniature
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

PROMPTS = [list(range(10, 17)), list(range(40, 52))]
NEW_TOKENS = 8


def check_served(config: Any) -> None:
    """Raises ConfigError for a model that this engine would sample wrongly, or not at all."""
    try:
        model: Any = miniature(config)
    except ConfigError as error:
        log.info("not tried out before the start: %s", error)
        return
    name = type(model).__name__
    try:
        drawn = TorchEngine(copy.deepcopy(model), pad_id=0).generate(PROMPTS, Sampling(max_new_tokens=NEW_TOKENS))
    except PeerLost as error:
        raise ConfigError(
            f"the torch engine cannot serve a {name}: {error.__cause__ or error}; serve it with vLLM"
        ) from error
    difference = 0.0
    for prompt, completion in zip(PROMPTS, drawn, strict=True):
        ids = [*prompt, *completion.token_ids.tolist()]
        own = logprobs_of(model, ids)[len(prompt) - 1 :]
        difference = max(difference, float((own - torch.from_numpy(completion.logprobs)).abs().max()))
    if not difference < TOLERANCE:
        raise ConfigError(
            f"the torch engine cannot serve a {name}: with a cache its log-probabilities differ by up to "
            f"{difference:.2g} from those without one, because its code ignores the positions or masks that it is "
            "given; serve it with vLLM"
        )
