"""The targets of a text are the tokens whose bytes lie in what is learned, counted here byte by byte."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel as TrimmingByteLevel
from transformers import PreTrainedTokenizerFast

from toolkit.data.documents.encode import Encoder, _Prepared

LETTERS = ["a", " ", "  ", "\n", "\n\n", "é", "e\u0301", "東京", "\U0001f98a", "<|x|>", "foo", " foo", "\u212b", "\t"]


def tokenizer(normalizer: Any = None, trim: bool = False, split: Any = None, **added: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "f"), ("o", "o"), ("Ġf", "oo"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ã", "©")]
    entries = {entry: i for i, entry in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend.model = BPE(entries, merges)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if trim:
        backend.post_processor = TrimmingByteLevel(trim_offsets=True)
    backend.add_special_tokens([AddedToken("<|x|>", **added)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


LLAMA_3 = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
KINDS: dict[str, dict[str, Any]] = {
    "gpt 2": {},
    "trimmed": {"trim": True},
    "llama 3": {"split": LLAMA_3},
    "qwen": {"split": LLAMA_3, "normalizer": normalizers.NFC()},
    "takes spaces": {"lstrip": True, "rstrip": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_are_the_tokens_whose_bytes_are_learned(kind: str) -> None:
    tokens, chance, counted = tokenizer(**KINDS[kind]), random.Random(0), 0
    for _ in range(500):
        parts = ["".join(chance.choices(LETTERS, k=chance.randint(1, 4))) for _ in range(chance.randint(2, 5))]
        edges = [0, *accumulate(map(len, parts))]
        text, spans = "".join(parts), list(zip(edges[1:-1:2], edges[2::2], strict=False))
        item = _Prepared(text, spans, False, starts=tuple(start for start, _ in spans))
        [(ids, mask, firsts)] = Encoder(tokens)._tokens([item])
        assert list(ids) == tokens(text, add_special_tokens=False)["input_ids"]
        # An entry of the vocabulary has a character for each byte; what is added is written as it is.
        entries = tokens.convert_ids_to_tokens(ids)
        bounds = [0, *accumulate(len(entry.encode()) if entry == "<|x|>" else len(entry) for entry in entries)]
        places = {edge: len(text[:edge].encode()) for span in spans for edge in span}
        if bounds[-1] != len(text.encode()) or not set(places.values()) <= set(bounds):
            continue  # a normaliser changes bytes, an added token takes spaces, or an edge is inside a token
        counted += 1
        learned = [any(places[a] <= begin < places[b] for a, b in spans) for begin in bounds[:-1]]
        assert (list(mask), firsts) == (learned, [bounds.index(places[a]) for a, _ in spans]), (text, spans)
    assert counted > 100
