from penstock.payload.discards import DISCARDS_PER_REPLY, Discards
from penstock.records.payload import PayloadRef


def refs(ring: str, count: int) -> list[PayloadRef]:
    return [PayloadRef(ring, 0, slot, 1, 1, 0) for slot in range(count)]


def test_a_list_is_repeated_until_its_owner_asks_anew():
    discards = Discards()
    discards.add(refs("a", 2))
    assert discards.answer(["a"], 7) == tuple(refs("a", 2))
    assert discards.answer(["a"], 7) == tuple(refs("a", 2)), "the answer was lost, so the request came again"
    assert discards.answer(["a"], 8) == ()
    assert not list(discards.waiting())


def test_what_comes_in_between_is_not_forgotten_with_what_was_sent():
    discards = Discards()
    first, second = refs("a", 2)
    discards.add([first])
    assert discards.answer(["a"], 1) == (first,)
    discards.add([second])
    assert discards.answer(["a"], 2) == (second,)


def test_a_long_list_goes_in_parts():
    discards = Discards()
    many = refs("a", DISCARDS_PER_REPLY + 1)
    discards.add(many)
    assert discards.answer(["a"], 1) == tuple(many[:-1])
    assert discards.answer(["a"], 2) == (many[-1],)


def test_each_owner_hears_of_its_own_rings():
    discards = Discards()
    discards.add([*refs("a", 1), *refs("b", 1), *refs("c", 1)])
    assert discards.answer(["a", "c"], 1) == (*refs("a", 1), *refs("c", 1))
