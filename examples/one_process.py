"""The whole algorithm in one file, top to bottom: a tiny language model learns to copy letters, in under a minute.

    python examples/one_process.py

The algorithm of `penstock run examples/quickstart.toml` in one process: no workers, no staleness, no checkpoints. The
advantages and the loss are those of the trainer. The sections below have the names of the packages of Penstock that do
the same with several processes.

Shape suffixes: B samples, T tokens of a sequence, V vocabulary, M trained tokens.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock import Prompt, advantages, losses

LETTERS, LENGTH, MARK = "abcdefgh", 4, ">"
STEPS, GROUPS, GROUP_SIZE = 200, 16, 8
LEARNING_RATE, WARMUP_STEPS, ENTROPY, MAX_GRAD_NORM = 2e-3, 5, 0.12, 1.0
PAD, EOS = 0, 2
VOCABULARY = ["<pad>", "<bos>", "<eos>", *LETTERS, MARK]


# envs: a stream of prompts, and rewards for completions.
def prompt_at(position: int, seed: int = 0) -> Prompt:
    """The same position always gives the same prompt."""
    question = "".join(np.random.default_rng([seed, position]).choice(list(LETTERS), LENGTH))
    return Prompt(text=question + MARK, columns={"answer": question})


def score(completions: list[str], answers: list[str]) -> list[float]:
    """The share of correct positions."""
    return [
        sum(given == right for given, right in zip(text, answer, strict=False)) / max(len(text), len(answer))
        for text, answer in zip(completions, answers, strict=True)
    ]


# engines: the model, its tokenizer, and drawing tokens from it.
def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[index] for index in ids if index > EOS)


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=EOS,
        )
    )


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompts_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts with completions, the log-probability of each new token when it was drawn, and which ones were drawn."""
    tokens_BT, logprobs, drawn = prompts_BT, [], []
    ended_B = torch.zeros(len(prompts_BT), dtype=torch.bool)
    for _ in range(LENGTH):
        log_p_BV = model(input_ids=tokens_BT).logits[:, -1].log_softmax(-1)
        drawn_B1 = torch.multinomial(log_p_BV.exp(), 1)
        drawn_B1[ended_B] = PAD
        drawn.append(~ended_B)
        logprobs.append(log_p_BV.gather(-1, drawn_B1))
        tokens_BT = torch.cat([tokens_BT, drawn_B1], dim=1)
        ended_B |= drawn_B1[:, 0] == EOS
    return tokens_BT, torch.cat(logprobs, dim=1), torch.stack(drawn, dim=1)


# train: from a batch to a gradient.
def loss_of(
    model: LlamaForCausalLM,
    tokens_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    trained_BT: torch.Tensor,
    advantage_B: torch.Tensor,
) -> torch.Tensor:
    start = tokens_BT.shape[1] - LENGTH
    completion_BT = tokens_BT[:, start:]
    log_p_BTV = model(input_ids=tokens_BT).logits[:, start - 1 : -1].log_softmax(-1)
    current_BT = log_p_BTV.gather(-1, completion_BT[..., None]).squeeze(-1)
    rows_M = trained_BT.nonzero()[:, 0]
    current_M = current_BT[trained_BT]
    tokens = losses.Tokens(
        current_M=current_M,
        old_M=current_M.detach(),  # one update per step: the old policy is the current one
        behaviour_M=behaviour_BT[trained_BT],
        advantage_M=advantage_B[rows_M],
        sequence_M=rows_M,
        sequences=len(tokens_BT),
    )
    loss_M, _ = losses.grpo(tokens, losses.TokenLossSection())
    entropy_M = -(log_p_BTV.exp() * log_p_BTV).sum(-1)[trained_BT]
    return (loss_M - ENTROPY * entropy_M).mean()


def main() -> float:
    torch.set_num_threads(1)  # the model is too small for several threads
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, recent = time.monotonic(), []
    for step in range(STEPS):
        # control: which prompts this step trains on. Every prompt is drawn GROUP_SIZE times.
        prompts = [prompt_at(step * GROUPS + index) for index in range(GROUPS)]
        repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]

        # rollout: completions and their rewards.
        prompts_BT = torch.tensor([encode(prompt.text) for prompt in repeated])
        tokens_BT, behaviour_BT, drawn_BT = generate(model, prompts_BT)
        completions = [decode(row) for row in tokens_BT[:, -LENGTH:].tolist()]
        rewards = score(completions, [prompt.columns["answer"] for prompt in repeated])

        # batch: how much better each sample is than the others of its group.
        advantage = advantages.grpo(np.asarray(rewards), np.full(GROUPS, GROUP_SIZE))

        # train: one update.
        loss = loss_of(model, tokens_BT, behaviour_BT, drawn_BT, torch.from_numpy(advantage).float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        rate = LEARNING_RATE * min(1.0, (step + 1) / (WARMUP_STEPS + 1)) * (1 - 0.9 * step / STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

        recent = [*recent, float(np.mean(rewards))][-10:]
        if step % 20 == 19:
            print(f"step {step + 1:4}  reward {np.mean(recent):.3f}  {time.monotonic() - began:5.1f} s", flush=True)
    return float(np.mean(recent))


if __name__ == "__main__":
    main()
