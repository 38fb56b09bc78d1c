"""Repeat the letters backwards. Change `prompt` and `score` into a task of your own."""

import numpy as np

from penstock import Prompt

LETTERS = "abcd"


class Letters:
    alphabet = LETTERS + ">"  # all characters, for the tiny model's tokenizer
    count = None  # prompts never run out

    def __init__(self, seed=0):
        self.seed = seed

    def prompt(self, position):
        """Returns the same prompt for the same position: draw from the seed and the position, keep no state."""
        drawn = np.random.default_rng([self.seed, position]).choice(list(LETTERS), 3)
        question = "".join(drawn)
        return Prompt(text=question + ">", columns={"answer": question[::-1]})

    def score(self, prompts, completions, *, answer, **columns):
        """One reward per completion: here the share of letters that are right."""
        return [
            sum(a == b for a, b in zip(given, right)) / max(len(given), len(right))
            for given, right in zip(completions, answer)
        ]
