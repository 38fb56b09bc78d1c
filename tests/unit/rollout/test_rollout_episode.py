"""Episodes keep what was generated, byte for byte, and go on from any point."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.rollout.episode import Episode


def spans(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def two_turns() -> Episode:
    episode = Episode.start([5, 6, 7])
    episode.generated(np.array([8, 9]), np.array([-0.5, -0.25]), spans((0, 3), (1, 4)), 3, "three")
    episode.finish_turn("ab")
    episode.replied("?", [10])
    episode.generated(np.array([11]), np.array([-1.5]), spans((0, 4)), 4, "four")
    episode.finish_turn("c")
    return episode


def test_arrays_are_joined_once_with_masks_logprobs_and_version_spans() -> None:
    arrays = two_turns().arrays()
    assert arrays["token_ids"].tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert arrays["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert arrays["logprobs"].tolist() == [0, 0, 0, -0.5, -0.25, 0, -1.5]
    assert arrays["versions"].tolist() == [[3, 3], [4, 4]]
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "token_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "versions": "int32",
        "truncated": "uint8",
    }


def test_a_sample_is_truncated_by_how_its_last_completion_ended() -> None:
    episode = two_turns()
    assert (episode.endings, episode.truncated) == (["stop", "stop"], False)
    episode.replied("?", [10])
    episode.generated(np.array([11]), np.array([-1.5]), spans((0, 4)), 4, "four")
    episode.finish_turn("d", "length")
    again = Episode.from_bytes(episode.to_bytes())
    assert (again.endings, again.truncated) == (["stop", "stop", "length"], True)
    assert again.arrays()["truncated"].tolist() == [1]


def test_the_oldest_version_and_its_digest_stand_for_the_episode() -> None:
    episode = two_turns()
    assert (episode.version, episode.digest, episode.generated_tokens) == (3, "three", 3)


def test_an_interrupted_completion_goes_on_from_its_kept_prefix_in_another_process() -> None:
    episode = Episode.start([1, 2])
    episode.generated(np.array([3]), np.array([-0.1]), spans((0, 0)), 0, "zero")
    assert episode.turn_tokens == 1
    again = Episode.from_bytes(episode.to_bytes())
    assert again.awaits_completion
    assert again.context() == [1, 2, 3]
    again.generated(np.array([4, 5]), np.array([-0.2, -0.3]), spans((0, 1)), 1, "one")
    assert again.turn_ids() == [3, 4, 5]
    again.finish_turn("cde")
    assert again.arrays()["token_ids"].tolist() == [1, 2, 3, 4, 5]
    assert again.arrays()["versions"].tolist() == [[2, 0], [3, 1]]
    assert not again.awaits_completion


def test_turn_ids_leave_earlier_turns_out() -> None:
    episode = two_turns()
    episode.replied("again", [12, 13])
    episode.generated(np.array([14]), np.array([-0.1]), spans((0, 4)), 4, "four")
    assert episode.turn_ids() == [14]


def test_a_reply_in_the_middle_of_a_completion_is_a_mistake() -> None:
    episode = Episode.start([1])
    episode.generated(np.array([2]), np.array([-0.1]), spans((0, 0)), 0, "")
    with pytest.raises(LocalProtocolError, match="before the completion was finished"):
        episode.replied("no", [3])


def test_tokens_without_logprobs_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="2 tokens came with 1"):
        Episode.start([1]).generated(np.array([2, 3]), np.array([-0.1]), spans(), 0, "")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="at least one token"):
        Episode.start([])


@pytest.mark.parametrize("body", [b"", b"\x93", b"nonsense" * 9])
def test_damaged_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Episode.from_bytes(body)


def test_pieces_that_do_not_fit_together_are_refused() -> None:
    episode = two_turns()
    episode.pieces[1].logprobs = np.zeros(1, np.float32)
    with pytest.raises(RemoteProtocolError, match="differ in length"):
        Episode.from_bytes(episode.to_bytes())


def test_tokens_of_another_type_are_refused() -> None:
    episode = two_turns()
    episode.pieces[1].token_ids = np.zeros(2, np.int64)
    with pytest.raises(RemoteProtocolError, match="tokens of int64"):
        Episode.from_bytes(episode.to_bytes())


def test_a_piece_that_follows_a_later_one_is_refused() -> None:
    episode = two_turns()
    episode.pieces[2].after = 3
    with pytest.raises(RemoteProtocolError, match="follows none before it"):
        Episode.from_bytes(episode.to_bytes())


def test_a_conversation_is_taken_back_to_where_a_completion_began() -> None:
    episode = two_turns()
    episode.replied("no, again", [20, 21], back_to=1)
    assert episode.context() == [5, 6, 7, 8, 9, 10, 20, 21]
    assert episode.context_tokens() == 8
    assert episode.context_tokens(back_to=0) == 3
    assert episode.awaits_completion
    episode.generated(np.array([22]), np.array([-0.1]), spans((0, 5)), 5, "five")
    episode.finish_turn("d")
    arrays = Episode.from_bytes(episode.to_bytes()).arrays()
    assert arrays["token_ids"].tolist() == [5, 6, 7, 8, 9, 10, 11, 20, 21, 22]
    assert arrays["branches"].tolist() == [[0, 0, 7], [1, 0, 6], [1, 7, 10]]
    assert arrays["versions"].tolist() == [[3, 3], [4, 4], [9, 5]]


def test_there_is_no_way_back_to_a_completion_that_never_was() -> None:
    with pytest.raises(LocalProtocolError, match="completion 2 of 2"):
        two_turns().replied("no", [], back_to=2)
