"""Text to token ids and back: one token per character for tiny models, or the tokenizer of a model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.errors import ConfigError
from penstock.wire.codec import DAMAGED

FILE_NAME = "character_tokenizer.json"
SPECIAL = ("<pad>", "<bos>", "<eos>")


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    pad_id: int
    eos_id: int
    stop_ids: tuple[int, ...]
    """Tokens that end a completion: the tokenizer's own, and those of the model's `generation_config`."""
    bos_ids: tuple[int, ...]
    """Tokens before a plain text, if the model was trained with them."""
    vocabulary_size: int

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Without special tokens, except those written in the text."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, directory: Path) -> None: ...


class _Saved(msgspec.Struct, frozen=True):
    alphabet: str


class CharacterTokenizer:
    """One token per character of an alphabet, after `<pad>`, `<bos>` and `<eos>`."""

    pad_id = 0
    bos_id = 1
    eos_id = 2
    stop_ids: tuple[int, ...] = (2,)
    bos_ids: tuple[int, ...] = ()

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
            found = f"{', '.join(map(repr, twice))} more than once in {alphabet!r}" if twice else "none"
            raise ConfigError(f"an environment's `alphabet` needs at least one character, each once; found {found}")
        self.alphabet = alphabet
        self.vocabulary_size = len(alphabet) + 3
        self._ids = {character: index + 3 for index, character in enumerate(alphabet)}

    def vocabulary(self) -> dict[str, int]:
        return dict(zip(SPECIAL, range(3), strict=True)) | self._ids

    def encode(self, text: str) -> list[int]:
        """Without special tokens. ConfigError names a character that is not in the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ConfigError(
                f"the character {error.args[0]!r} is not in the model's alphabet {self.alphabet!r}; "
                "add it to the environment's `alphabet`"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out."""
        return "".join(self.alphabet[index - 3] for index in ids if index >= 3)

    def save(self, directory: Path) -> None:
        """Writes files with which the directory opens as a model, by transformers too."""
        (directory / FILE_NAME).write_bytes(msgspec.json.encode(_Saved(self.alphabet)))
        special = dict(zip(SPECIAL, (self.pad_id, self.bos_id, self.eos_id), strict=True))
        kept = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
        fast = {
            "version": "1.0",
            "added_tokens": [{"id": index, "content": token, **kept} for token, index in special.items()],
            "pre_tokenizer": split,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": special | self._ids, "unk_token": SPECIAL[0]},
        }
        (directory / "tokenizer.json").write_bytes(msgspec.json.encode(fast))
        names = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
        (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))


class PretrainedTokenizer:
    """A tokenizer of the transformers library."""

    def __init__(self, inner: Any, stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids` besides the tokenizer's own end-of-sequence token."""
        self.inner = inner
        own = () if inner.eos_token_id is None else (int(inner.eos_token_id),)
        self.stop_ids = tuple(dict.fromkeys([*own, *stop_ids]))
        if not self.stop_ids:
            raise ConfigError(
                "the model's tokenizer has no end-of-sequence token, and its generation_config has no eos_token_id: "
                "a completion could not end; set `eos_token` in its tokenizer_config.json"
            )
        self.eos_id = self.stop_ids[0]
        # Some tokenizers put a token before every text, and their models were trained with it.
        before = inner.encode("", add_special_tokens=True)
        self.bos_ids = (int(before[0]),) if before and before[0] == inner.bos_token_id else ()
        self.pad_id = int(inner.pad_token_id) if inner.pad_token_id is not None else self.eos_id
        self.vocabulary_size = len(inner)

    def vocabulary(self) -> dict[str, int]:
        return self.inner.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out."""
        return self.inner.decode(ids, skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """In the library's own files."""
        self.inner.save_pretrained(directory)


def load_tokenizer(directory: Path, gguf_file: str | None = None) -> Tokenizer:
    """The tokenizer saved in a model directory, or inside its GGUF file."""
    own = directory / FILE_NAME
    if own.exists():
        try:
            return CharacterTokenizer(msgspec.json.decode(own.read_bytes(), type=_Saved).alphabet)
        except DAMAGED as error:
            raise ConfigError(f"{own} is damaged: {error}") from error
    from transformers import AutoTokenizer

    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    inner = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **options)
    return PretrainedTokenizer(inner, _generation_stop_ids(directory))


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _generation_stop_ids(directory: Path) -> list[int]:
    """The tokens that end a completion according to the model's `generation_config`: one, or several."""
    try:
        found = msgspec.json.decode((directory / "generation_config.json").read_bytes(), type=_Generation).eos_token_id
    except FileNotFoundError:
        return []
    except DAMAGED as error:
        raise ConfigError(f"{directory / 'generation_config.json'} is damaged: {error}") from error
    return [found] if isinstance(found, int) else found or []
