"""Prompt streams: the same position gives the same prompt, everywhere and always."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.envs.cursor import Cursor, digits, draw
from penstock.envs.mixture import PART_COLUMN, Mixture
from penstock.envs.protocol import ConversingEnvironment, GoBack, Message, Prompt, TextEnvironment
from penstock.envs.tasks import Arithmetic, Copy, Reverse, Sort
from penstock.envs.tools import WithTools
from penstock.errors import ConfigError, LocalProtocolError


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    for rows in (1, 2, 3, 17, 64, 1000):
        cursor = Cursor(rows, seed=5)
        epochs = [[cursor.row(epoch * rows + offset) for offset in range(rows)] for epoch in range(3)]
        assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
        assert rows < 17 or epochs[0] != epochs[1] != epochs[2]


def test_a_huge_set_costs_nothing() -> None:
    cursor = Cursor(10**12, seed=1)
    rows = {cursor.row(position) for position in range(100)}
    assert len(rows) == 100
    assert max(rows) > 10**11


def test_orders_are_pinned_so_that_a_resumed_run_sees_the_same_prompts_after_an_upgrade() -> None:
    assert [Cursor(10, seed=7).row(position) for position in range(10)] == PINNED_ORDER
    assert [Copy(seed=3).prompt(position).text for position in range(4)] == PINNED_PROMPTS


PINNED_ORDER = [3, 5, 4, 0, 9, 6, 1, 7, 8, 2]
PINNED_PROMPTS = ["hfef>", "baed>", "chbd>", "hbdb>"]


def test_epochs_bound_the_stream() -> None:
    cursor = Cursor(5, seed=0, epochs=2)
    assert cursor.count == 10
    assert Cursor(5, seed=0).count is None
    for position in (-1, 10):
        with pytest.raises(LocalProtocolError, match="outside the stream of 10"):
            cursor.row(position)
    assert [Cursor(3, 0, shuffle=False).row(position) for position in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("rows", "epochs"), [(0, None), (3, 0)])
def test_impossible_cursors_are_refused(rows: int, epochs: int | None) -> None:
    with pytest.raises(ConfigError, match="at least"):
        Cursor(rows, seed=0, epochs=epochs)


def test_draws_differ_by_seed_position_and_purpose() -> None:
    drawn = {draw(seed, position, purpose) for seed in range(4) for position in range(4) for purpose in range(4)}
    assert len(drawn) == 64
    counts = Counter(digit for position in range(2000) for digit in digits(1, position, 8, 4))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.2 * min(counts.values())


@pytest.mark.parametrize(
    ("task", "question", "answer"),
    [(Copy(), "badc", "badc"), (Reverse(), "badc", "cdab"), (Sort(), "badc", "abcd")],
)
def test_letter_tasks_know_the_answer(task: Copy, question: str, answer: str) -> None:
    assert task.answer(question) == answer
    prompt = task.prompt(11)
    assert prompt == task.prompt(11)
    assert set(prompt.text + prompt.columns["answer"]) <= set(task.alphabet)
    assert task.score([prompt.text], [prompt.columns["answer"]], answer=[prompt.columns["answer"]]) == [1.0]
    assert len(prompt.columns["answer"]) == task.length
    assert isinstance(task, TextEnvironment)
    assert not isinstance(task, ConversingEnvironment)


def test_partial_credit_counts_positions_and_punishes_surplus() -> None:
    rewards = Copy().score([""] * 5, ["abcd", "abxx", "ab", "abcdabcd", ""], answer=["abcd"] * 5)
    assert rewards == [1.0, 0.5, 0.5, 0.5, 0.0]


def test_arithmetic_is_right() -> None:
    task = Arithmetic(limit=20, seed=4)
    for position in range(200):
        prompt = task.prompt(position)
        question = prompt.text.removesuffix("=")
        operation = next(sign for sign in "+-*" if sign in question)
        left, right = map(int, question.split(operation))
        assert prompt.columns["answer"] == str({"+": left + right, "-": left - right, "*": left * right}[operation])
        assert set(prompt.text + prompt.columns["answer"]) <= set(task.alphabet)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Copy(letters=1),
        lambda: Copy(letters=27),
        lambda: Copy(length=0),
        lambda: Arithmetic(limit=1),
        lambda: Arithmetic(operations="/"),
    ],
)
def test_impossible_tasks_are_refused(make) -> None:
    with pytest.raises(ConfigError, match="must be"):
        make()


def test_a_mixture_keeps_its_proportions_in_every_block_and_each_parts_order() -> None:
    mixture = Mixture({"copy": (Copy(), 3.0), "sort": (Sort(), 1.0)}, seed=2)
    places = [mixture.place(position) for position in range(400)]
    for block in range(4):
        assert Counter(name for name, _ in places[block * 100 : block * 100 + 100]) == {"copy": 75, "sort": 25}
    for name in ("copy", "sort"):
        own = [position for part, position in places if part == name]
        assert own == list(range(len(own))), "none of a part's prompts is skipped or repeated"
    assert places == [Mixture({"copy": (Copy(), 3), "sort": (Sort(), 1)}, seed=2).place(p) for p in range(400)]
    assert set(mixture.alphabet) == set(Copy().alphabet)


def test_a_mixture_scores_with_the_right_part() -> None:
    mixture = Mixture({"copy": (Copy(), 1.0), "reverse": (Reverse(), 1.0)})
    prompts = [mixture.prompt(position) for position in range(20)]
    columns = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
    assert set(columns[PART_COLUMN]) == {"copy", "reverse"}
    assert mixture.score([p.text for p in prompts], columns["answer"], **columns) == [1.0] * 20
    assert mixture.reply(prompts[0], ["x"]) is None


@pytest.mark.parametrize("parts", [{}, {"copy": (Copy(), 0.0)}, {"copy": (Copy(), -1.0)}])
def test_impossible_mixtures_are_refused(parts) -> None:
    with pytest.raises(ConfigError, match=r"at least one|positive"):
        Mixture(parts)


def test_messages_are_shown_as_plain_mappings() -> None:
    assert Prompt(messages=(Message("user", "hi"),)).shown() == [{"role": "user", "content": "hi"}]


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def test_tools_are_plain_functions() -> None:
    environment = WithTools(Arithmetic(), [add])
    prompt = environment.prompt(0)
    assert "- add(a: 'int', b: 'int') -> 'int': The sum of two numbers." in prompt.text
    assert isinstance(environment, ConversingEnvironment)
    assert environment.reply(prompt, ["42"]) is None
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert environment.reply(prompt, [f"let me see {call}"]) == "<tool_result>3</tool_result>"


def test_a_mistaken_call_may_be_forgotten() -> None:
    environment = WithTools(Arithmetic(), [add], forget_mistakes=True)
    prompt = environment.prompt(0)
    wrong, right = (
        '<tool_call>{"name": "sub"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    )
    text = "<tool_result>error: there is no tool 'sub'; there are add</tool_result>"
    assert environment.reply(prompt, ["first", wrong]) == GoBack(1, text)
    assert environment.reply(prompt, [wrong + right]) == f"{text}<tool_result>3</tool_result>", "not all of it is wrong"
    assert environment.reply(prompt, [wrong, "42"]) is None


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("{", "must be JSON"),
        ('{"name": "sub"}', "there is no tool 'sub'; there are add"),
        ('{"name": "add", "arguments": {"a": 1}}', "TypeError"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_the_reason(body: str, answer: str) -> None:
    assert answer in WithTools(Arithmetic(), [add]).answer(body)
