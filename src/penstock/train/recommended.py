"""Settings that learn, by kind of model: what a run uses for whatever its configuration leaves open.

The tiny model's were chosen over several seeds on copying letters with data two versions old, the gymnasium policy's
on CartPole likewise. A small entropy bonus is what keeps a model trained from nothing off plateaus; a pretrained one
must not have it.
"""

from __future__ import annotations

from penstock.train.loss import ControlLossSettings, LossSettings, TokenLossSettings
from penstock.train.model import ModelSpec, PretrainedLanguageModel, TinyLanguageModel
from penstock.train.step import OptimSettings


def settings_for(spec: ModelSpec, total_steps: int) -> tuple[LossSettings, OptimSettings]:
    """Loss and optimiser for a run of `total_steps`."""
    if isinstance(spec, TinyLanguageModel):
        return TokenLossSettings(entropy_coefficient=0.08), OptimSettings(learning_rate=2e-3, warmup_steps=5)
    if isinstance(spec, PretrainedLanguageModel):
        return TokenLossSettings(), OptimSettings(learning_rate=1e-6, beta2=0.99, warmup_steps=10)
    return ControlLossSettings(), OptimSettings(
        learning_rate=2e-3, epochs=4, minibatches=4, max_grad_norm=0.5, decay_steps=total_steps
    )
