"""Guess a letter in three tries; the environment replies "higher" or "lower"."""

from penstock import Prompt

LETTERS = "abcdefgh"


class Guess:
    alphabet = LETTERS + ">l|"  # "h" is both a letter and "higher"
    count = None

    def __init__(self, seed=0):
        self.seed = seed

    def prompt(self, position):
        return Prompt(text=">", columns={"answer": LETTERS[(position * 5 + self.seed) % len(LETTERS)]})

    def reply(self, prompt, completions):
        """The reply to the last completion, never trained on; None ends the episode."""
        guess, right = completions[-1], prompt.columns["answer"]
        return None if guess == right else "h|" if guess < right else "l|"

    def score(self, prompts, completions, *, answer, turns, **columns):
        """`completions` are the last of each episode, `turns` all of them: fewer tries are worth more."""
        return [float(guess == right) / len(tries) for guess, right, tries in zip(completions, answer, turns)]
