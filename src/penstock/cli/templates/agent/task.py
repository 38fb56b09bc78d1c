"""Guess a letter in three tries; the environment says whether it lies higher or lower."""

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
        """What the policy is shown after its last completion; None ends the episode. It is never trained."""
        said, right = completions[-1], prompt.columns["answer"]
        return None if said == right else "h|" if said < right else "l|"

    def score(self, prompts, completions, *, answer, turns, **columns):
        """`completions` are the last of each episode, `turns` all of them: fewer tries are worth more."""
        return [float(said == right) / len(tries) for said, right, tries in zip(completions, answer, turns)]
