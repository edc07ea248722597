"""Finds the tokens of spans by counting bytes, for tokenizers whose tokens are pieces of the text's UTF-8 bytes.

The tokenizer's own offsets cost half of its time. In byte-level BPE each character of an entry is one byte of the text,
so the bytes of the tokens before a token say where it begins. What may spoil the count can only leave bytes out (an
added token that takes the spaces next to it), so a count that gives the length of the text is right.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from toolkit.data.documents.fast_tokens import FastTokens

SPLITS = {"Split", "Digits", "Punctuation", "ByteLevel"}
"""Pre-tokenizers that add nothing to a text."""


@dataclass(frozen=True)
class ByteTokens:
    """Encodes texts with a byte-level tokenizer, without special tokens.

    Attributes:
        encoder: makes the tokens.
        widths: bytes of each token, (vocabulary,), int64.
        is_composed: whether texts are brought into Unicode's form NFC first, as Qwen's are.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: FastTokens
    widths: np.ndarray[Any, Any]
    is_composed: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteTokens | None:
        """Returns None for a tokenizer whose tokens are not bytes, or that is not known to leave a text as it is."""
        return _byte_tokens(tokenizer, len(tokenizer))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        """Returns the tokens of each text, each (length,), int32."""
        found = self.encoder.encode(texts, getattr(self.tokenizer, "split_special_tokens", False))
        return [np.array(ids, np.int32) for ids in found]

    def places(self, text: str, ids: np.ndarray[Any, Any], edges: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """Returns the number of the token that begins at each of these characters, (edges,), int64.

        It is None where the bytes of the tokens are not those of the text, or an edge is inside a token.

        Args:
            edges: rising; the length of the text is the number after the last token.
        """
        if self.is_composed and not unicodedata.is_normalized("NFC", text):
            return None
        cuts = [0, *edges, len(text)]
        places = [0, *accumulate(len(text[start:end].encode()) for start, end in pairwise(cuts))]
        bounds = np.concatenate([[0], np.cumsum(self.widths[ids])])  # before each token, and the end
        found = np.searchsorted(bounds, places)
        return None if bounds[-1] != places[-1] or (bounds[found] != places).any() else found[1:-1]


def tokens_by(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the package that this process has tokenised texts with, or None if it has not by `ByteTokens`."""
    found = ByteTokens.of(tokenizer)
    return found.encoder.way if found is not None and found.encoder.calls else None


@lru_cache(maxsize=4)  # large vocabularies take a tenth of a second
def _byte_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> ByteTokens | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or not _encodes_by_backend(tokenizer):
        return None
    normalizer = [part["type"] for part in _parts(backend.normalizer)]
    if not _keeps_bytes(backend) or normalizer not in ([], ["NFC"]):
        return None
    added = {number: len(token.content.encode()) for number, token in backend.get_added_tokens_decoder().items()}
    known = backend.get_vocab(with_added_tokens=False)
    widths = np.zeros(1 + max([*known.values(), *added]), dtype=np.int64)
    widths[list(known.values())] = [len(entry) for entry in known]
    widths[list(added)] = list(added.values())
    return ByteTokens(tokenizer, FastTokens(backend), widths, normalizer == ["NFC"])


def _encodes_by_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether a call of the tokenizer gives a text to its backend as it is."""
    return all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus")
    )


def _keeps_bytes(backend: Tokenizer) -> bool:
    """Returns whether the entries of the vocabulary hold one character for each byte of a text."""
    model, splits = backend.model, _parts(backend.pre_tokenizer)
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    kinds, adds_space = {part["type"] for part in splits}, any(part.get("add_prefix_space") for part in splits)
    # With an entry for each byte no byte becomes the unknown token, which may stand for several.
    has_all_bytes = all(backend.model.token_to_id(letter) is not None for letter in ByteLevel.alphabet())
    return "ByteLevel" in kinds and kinds <= SPLITS and not adds_space and has_all_bytes


def _parts(part: Any) -> list[dict[str, Any]]:
    """Returns the settings of a normalizer or pre-tokenizer, or of each in a sequence; empty for none."""
    state = {} if part is None else json.loads(part.__getstate__())
    return [one for one in state.get("normalizers") or state.get("pretokenizers") or [state] if one]
