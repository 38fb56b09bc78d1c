"""Whether a model can be trained on what it samples: tried out on a miniature of it, before its weights are loaded."""

from __future__ import annotations

import logging
from typing import Any

from penstock.engines.architecture import TOLERANCE, logprobs_of, miniature
from penstock.errors import ConfigError

log = logging.getLogger(__name__)


def check_trained(config: Any) -> None:
    """Raises ConfigError for a model that is no causal language model."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"a model of type {config.model_type!r} cannot be trained: transformers {__version__} has no causal "
            f"language model for {type(config).__name__}. If a text model is part of it, save that one by itself"
        )
    try:
        model: Any = miniature(config)
    except ConfigError as error:
        log.info("not tried out before the start: %s", error)
        return
    ids = list(range(20, 36))
    difference = float((logprobs_of(model, ids)[:9] - logprobs_of(model, ids[:10])).abs().max())
    if not difference < TOLERANCE:
        raise ConfigError(
            f"a {type(model).__name__} cannot be trained: the log-probability of a token changes by up to "
            f"{difference:.2g} with the tokens after it. Choose a causal model; of a kind that can be both, set "
            "is_decoder = true in its config.json"
        )
