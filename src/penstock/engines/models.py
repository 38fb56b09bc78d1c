"""The policies that can be trained: a tiny language model from a config, a model from a directory, gymnasium policies.

policy = build(TinyLanguageModel(alphabet="abcdefgh"))
policy.named_tensors()      # published and checkpointed
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn

from penstock.engines.architecture import build_model
from penstock.engines.settings import LoraSection, MlpModel, TinyModel
from penstock.engines.tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from penstock.errors import ConfigError
from penstock.runtime.tensors import module_tensors

ADAPTER_FILE = "adapter_model.safetensors"
"""The file name that peft expects."""


_TINY, _MLP = TinyModel(), MlpModel()


class TinyLanguageModel(msgspec.Struct, frozen=True, tag="tiny"):
    """A small causal transformer with a vocabulary of single characters and random weights from the seed."""

    alphabet: str = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;?!+-*/=()>"
    hidden_size: int = _TINY.hidden
    layers: int = _TINY.layers
    heads: int = _TINY.heads
    max_positions: int = _TINY.max_length
    seed: int = 0


class PretrainedLanguageModel(msgspec.Struct, frozen=True, tag="pretrained"):
    """A model directory as transformers writes it, or a GGUF file inside a directory (dequantised on load)."""

    path: str
    gguf_file: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


class GymnasiumPolicy(msgspec.Struct, frozen=True, tag="gymnasium"):
    """A small network for vector observations, with a value head."""

    observation_shape: tuple[int, ...]
    action_kind: Literal["discrete", "gaussian"]
    action_size: int
    """Number of actions, or of action components."""
    hidden_size: int = _MLP.hidden
    normalize_observations: bool = _MLP.normalize_observations
    normalize_rewards: bool = _MLP.normalize_rewards
    seed: int = 0


ModelSpec = TinyLanguageModel | PretrainedLanguageModel | GymnasiumPolicy


class Policy:
    """A module that can be trained, published and restored; the subclasses add what their engine needs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def named_tensors(self) -> dict[str, Tensor]:
        """The live weights by name, as published and checkpointed. Not copies."""
        return module_tensors(self.module)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of `named_tensors`."""
        return {name: tensor.detach().clone() for name, tensor in self.named_tensors().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites all tensors in place. Raises ConfigError, before any change, unless names and shapes agree."""
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        with torch.no_grad():
            for name, tensor in self.named_tensors().items():
                tensor.copy_(tensors[name])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigError unless these are the names and shapes of the policy's tensors."""
        own = {name: tuple(tensor.shape) for name, tensor in self.named_tensors().items()}
        wrong = sorted(own.keys() ^ shapes.keys())
        wrong += [name for name in own.keys() & shapes.keys() if own[name] != shapes[name]]
        if wrong:
            raise ConfigError(
                f"these weights belong to another model: {len(wrong)} tensors are missing, unexpected or of another "
                f"shape, the first is {wrong[0]!r}; use the configuration with which they were saved"
            )

    def prepare_training(self) -> None:
        """Call before a step. Disables dropout, as generation does."""
        self.module.eval()

    def parameter_count(self) -> int:
        """Number of parameters of the module."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def save_config(self, directory: Path) -> None:
        """Writes all files besides the tensors that are needed to open the model again."""


class LanguagePolicy(Policy):
    """A transformers causal language model and its tokenizer."""

    def __init__(self, module: nn.Module, tokenizer: Tokenizer) -> None:
        super().__init__(module)
        self.tokenizer = tokenizer
        self.recomputes = False
        """Whether activations are recomputed in the backward pass."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Encloses forward passes without training."""
        self.module.eval()
        return nullcontext()

    def checkpoint_activations(self) -> None:
        """Keeps only the activations between layers, and recomputes the others in the backward pass."""
        model: Any = self.module
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.recomputes = True

    def prepare_training(self) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        super().prepare_training()
        for layer in self.module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = self.recomputes  # it checks its own mode; the modules inside stay without dropout

    def save_config(self, directory: Path) -> None:
        config = self.module.config
        assert hasattr(config, "save_pretrained")
        config.save_pretrained(directory)  # type: ignore[operator]
        self.tokenizer.save(directory)


class AdaptedPolicy(LanguagePolicy):
    """A frozen language model with an adapter: `named_tensors` are the adapter's."""

    def base(self) -> LanguagePolicy:
        """The model without its adapter. Shares its memory."""
        return _BasePolicy(self.module, self.tokenizer)

    def save_config(self, directory: Path) -> None:
        super().save_config(directory)
        model: Any = self.module
        model.peft_config["default"].save_pretrained(directory)

    def save_adapter(self, directory: Path, base: str) -> None:
        """Writes the adapter in the format of peft, with the directory or hub name of its base, and the tokenizer."""
        from peft import get_peft_model_state_dict

        model: Any = self.module
        # Only the adapter is trained, so no embedding is saved with it; "auto" would query the hub.
        tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, directory / ADAPTER_FILE, metadata={"format": "pt"})
        config = copy.copy(model.peft_config["default"])
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(directory)
        self.tokenizer.save(directory)

    def save_merged(self, directory: Path) -> None:
        """Writes the model with the adapter merged into its weights, in the format of transformers. Do not use the
        policy afterwards."""
        model: Any = self.module
        model.merge_and_unload(safe_merge=True).save_pretrained(directory)
        self.tokenizer.save(directory)


class _BasePolicy(LanguagePolicy):
    @contextmanager
    def evaluating(self) -> Iterator[None]:
        model: Any = self.module
        with super().evaluating(), model.disable_adapter():
            yield


def adapt(policy: LanguagePolicy, lora: LoraSection, *, seed: int = 0) -> AdaptedPolicy:
    """Freezes the model and adds an adapter, which has no effect before training. Do not use `policy` afterwards."""
    try:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("[pipeline.lora] needs peft: pip install 'penstock-rl[lora]'") from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.targets or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # The library draws from the global generator only.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = get_peft_model(policy.module, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"lora.targets {lora.targets}: {error}") from error
    return AdaptedPolicy(module, policy.tokenizer)


MIN_RETURN_STD = 1e-4
"""Below it, differences between returns are rounding errors, which a division would amplify."""
RETURNS_RATE = 0.2
"""Weight of a new batch in the running mean and spread of returns."""


NORMALIZED_LIMIT = 10.0
"""Normalised observations and rewards are clipped at this number of standard deviations."""


class RunningStatistics(nn.Module):
    """Mean and variance of all rows so far. Its tensors are part of the weights: replicas read them, only the trainer
    updates them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.variance: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(1))

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """`rows` has one row per observation. A batch with a number that is not finite is ignored."""
        rows = rows.double()
        if not len(rows) or not torch.isfinite(rows).all():
            return
        seen, new = self.count.double(), float(len(rows))
        total, change = seen + new, rows.mean(0) - self.mean
        squares = self.variance * seen + rows.var(0, correction=0) * new + change.square() * seen * new / total
        self.mean.add_(change * new / total)
        self.variance.copy_(squares / total)
        self.count.copy_(total)

    @property
    def scale(self) -> Tensor:
        """The divisor per column; 1 for columns without variance."""
        return torch.where(self.variance > 1e-8, self.variance, 1.0).sqrt()


class ActorCritic(nn.Module):
    """Two separate towers of two tanh layers: the actor's logits or means, and the critic's value."""

    def __init__(self, spec: GymnasiumPolicy, generator: torch.Generator) -> None:
        super().__init__()
        self.action_kind = spec.action_kind
        self.return_mean: Tensor
        self.return_std: Tensor
        self.batches: Tensor
        inputs = math.prod(spec.observation_shape)
        hidden = spec.hidden_size
        self.actor = nn.Sequential(
            _linear(inputs, hidden, math.sqrt(2), generator),
            nn.Tanh(),
            _linear(hidden, hidden, math.sqrt(2), generator),
            nn.Tanh(),
            _linear(hidden, spec.action_size, 0.01, generator),
        )
        self.critic = nn.Sequential(
            _linear(inputs, hidden, math.sqrt(2), generator),
            nn.Tanh(),
            _linear(hidden, hidden, math.sqrt(2), generator),
            nn.Tanh(),
            _linear(hidden, 1, 0.0, generator),  # an untrained critic predicts 0: its noise would hide rare rewards
        )
        self.register_buffer("return_mean", torch.zeros(1))
        self.register_buffer("return_std", torch.ones(1))
        self.register_buffer("batches", torch.zeros(1))
        self.observed = RunningStatistics(inputs) if spec.normalize_observations else None
        self.rewarded = RunningStatistics(1) if spec.normalize_rewards else None
        self.log_std = nn.Parameter(torch.zeros(spec.action_size)) if spec.action_kind == "gaussian" else None

    def _inputs(self, observations: Tensor) -> Tensor:
        flat = observations.flatten(1)
        if self.observed is None:
            return flat
        return ((flat - self.observed.mean) / self.observed.scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def distribution(self, observations: Tensor) -> torch.distributions.Distribution:
        """Over actions, one per observation."""
        heads = self.actor(self._inputs(observations))
        if self.log_std is None:
            return torch.distributions.Categorical(logits=heads, validate_args=False)
        normal = torch.distributions.Normal(heads, self.log_std.exp(), validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False)

    def value(self, observations: Tensor) -> Tensor:
        """Expected discounted return, one per observation. The critic's own output is in units of `return_std`."""
        return self.critic(self._inputs(observations)).squeeze(-1) * self.return_std + self.return_mean

    @torch.no_grad()
    def observe_episodes(self, observations: Tensor, returns: Tensor) -> None:
        """Updates the statistics of observations, and of the discounted returns whose spread scales the rewards."""
        if self.observed is not None:
            self.observed.add(observations.flatten(1))
        if self.rewarded is not None:
            self.rewarded.add(returns.unsqueeze(1))

    def normalized(self, rewards: Tensor) -> Tensor:
        """Rewards as used by the losses."""
        if self.rewarded is None:
            return rewards
        return (rewards / self.rewarded.scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    @torch.no_grad()
    def observe_returns(self, returns: Tensor) -> None:
        """Updates the mean and spread of returns, and rescales the critic's last layer so that no value changes."""
        mean, variance = returns.mean(), returns.var(correction=0)
        if not torch.isfinite(variance) or variance < 1e-16:
            return  # no scale can be estimated
        self.batches += 1
        rate = max(1.0 / float(self.batches), RETURNS_RATE)
        old_mean, old_std = self.return_mean.clone(), self.return_std.clone()
        self.return_mean.lerp_(mean, rate)
        # Not as a difference of squares: in float32 that is noise where returns are similar and far from zero.
        within = old_std.square().lerp(variance, rate)
        between = rate * (1 - rate) * (mean - old_mean).square()
        self.return_std.copy_((within + between).sqrt().clamp(min=MIN_RETURN_STD))
        last = self.critic[-1]
        assert isinstance(last, nn.Linear)
        last.weight *= old_std / self.return_std
        last.bias.copy_((old_std * last.bias + old_mean - self.return_mean) / self.return_std)

    def act(self, observations: Tensor, generator: torch.Generator, greedy: bool = False) -> tuple[Tensor, Tensor]:
        """Sampled (or most likely) actions and their log-probabilities, one per observation."""
        with torch.no_grad():
            heads = self.actor(self._inputs(observations))
            if self.log_std is None:
                logprobs = torch.log_softmax(heads, dim=-1)
                if greedy:
                    actions = logprobs.argmax(-1)
                else:
                    actions = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(-1)
                return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            noise = torch.randn(heads.shape, generator=generator, device=heads.device) * (0.0 if greedy else 1.0)
            actions = heads + noise * self.log_std.exp()
            return actions, self.distribution(observations).log_prob(actions)


class ActorCriticPolicy(Policy):
    """A gymnasium policy."""

    def __init__(self, module: ActorCritic) -> None:
        super().__init__(module)
        self.network = module


def build(spec: ModelSpec) -> LanguagePolicy | ActorCriticPolicy:
    """The policy that `spec` describes. The same spec gives the same weights, in every process."""
    # cuDNN's attention builds a plan for every new shape, which takes tens of milliseconds; each decode step, and
    # nearly each micro-batch, has a new shape. Generation is three times faster with the other kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if isinstance(spec, TinyLanguageModel):
        return _build_tiny(spec)
    if isinstance(spec, PretrainedLanguageModel):
        return _build_pretrained(spec)
    return ActorCriticPolicy(ActorCritic(spec, torch.Generator().manual_seed(spec.seed)))


def _build_tiny(spec: TinyLanguageModel) -> LanguagePolicy:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = CharacterTokenizer(spec.alphabet)
    if spec.hidden_size % spec.heads:
        raise ConfigError(f"hidden_size {spec.hidden_size} must be a multiple of heads {spec.heads}")
    config = LlamaConfig(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.hidden_size * 4,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    # The library draws initial weights from the global generator only.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = LlamaForCausalLM(config)
    return LanguagePolicy(model, tokenizer)


def _build_pretrained(spec: PretrainedLanguageModel) -> LanguagePolicy:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = Path(spec.path)
    if not directory.is_dir():
        raise ConfigError(
            f"model path {spec.path!r} is not a directory; expected a model saved by transformers or a GGUF"
        )
    options = {} if spec.gguf_file is None else {"gguf_file": spec.gguf_file}
    try:
        model = build_model(
            AutoModelForCausalLM.from_pretrained,
            directory,
            dtype=getattr(torch, spec.dtype),
            local_files_only=True,  # a mistyped path must not become a download
            trust_remote_code=False,  # otherwise a terminal would be asked
            **options,
        )
        tokenizer = load_tokenizer(directory, spec.gguf_file)
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "" if spec.gguf_file is None else " (a GGUF file needs: pip install 'penstock-rl[gguf]')"
        raise ConfigError(f"cannot load a language model from {spec.path!r}: {error}{hint}") from error
    if spec.gguf_file is not None:
        _clear_quantisation(model)
    return LanguagePolicy(model, tokenizer)


def _clear_quantisation(model: Any) -> None:
    """A loaded GGUF is dequantised; with the attributes that the library leaves, the model could not be saved."""
    model.is_quantized = False
    model.hf_quantizer = None
    del model.quantization_method, model.config.quantization_config


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    # First without weights, so that the global generator is not used.
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        layer.bias.zero_()
    return layer
