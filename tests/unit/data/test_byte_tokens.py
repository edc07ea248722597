"""Targets found by counting the bytes of tokens are those of the tokenizer's own offsets."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.conversations import ALL_TEMPLATES, CONVERSATIONS, TOOLS, kinds_of, tokenizer_for
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel as TrimmingByteLevel
from transformers import PreTrainedTokenizerFast

from toolkit.data.documents.byte_tokens import ByteTokens
from toolkit.data.documents.encode import Encoder, _by_offsets, _Prepared
from toolkit.data.kinds.registry import LAYOUTS
from toolkit.data.layouts.layout import Layout
from toolkit.data.templates.chat import render
from toolkit.data.templates.masks import target_mask

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
def test_the_mask_is_that_of_offsets(kind: str) -> None:
    tokens = tokenizer(**KINDS[kind])
    counting = ByteTokens.of(tokens)
    assert counting is not None
    chance, found = random.Random(0), 0
    for _ in range(500):
        parts = ["".join(chance.choices(LETTERS, k=chance.randint(1, 4))) for _ in range(chance.randint(1, 5))]
        text, spans, end = "".join(parts), [], 0
        for number, part in enumerate(parts):
            start, end = end, end + len(part)
            spans += [(start, end)] if number % 2 else []
        [ids] = counting.encode([text])
        expected = tokens(text, add_special_tokens=False, return_offsets_mapping=True)
        assert ids.tolist() == expected["input_ids"]
        edges = sorted({edge for span in spans for edge in span})
        places = counting.places(text, ids, edges)
        if places is not None:
            found += 1
            token_at = dict(zip(edges, places.tolist(), strict=True))
            mask = [any(token_at[a] <= i < token_at[b] for a, b in spans) for i in range(len(ids))]
            assert mask == target_mask(spans, expected["offset_mapping"]), (text, spans)
            item = _Prepared(text, [*spans, (len(text), len(text))], False, starts=tuple(edges[:1]))
            firsts = next(_by_offsets(tokens, [item]))[2]
            assert firsts == [token_at[edge] for edge in edges[:1]], (text, spans)
    assert found > 100


def test_what_does_not_add_up_is_left_to_offsets() -> None:
    composed, greedy = tokenizer(normalizers.NFC()), tokenizer(lstrip=True)
    # NFC makes the first letter of the last text three bytes longer, and each of the others one byte shorter.
    for tokens, text in ((greedy, "a <|x|>"), (composed, "a\u212b"), (composed, "\u0958\u212b\u212b\u212b")):
        counting = ByteTokens.of(tokens)
        assert counting is not None
        [ids] = counting.encode([text])
        assert counting.places(text, ids, [1]) is None
    counting = ByteTokens.of(tokenizer())
    assert counting is not None
    [ids] = counting.encode(["a foo"])
    assert counting.places("a foo", ids, [1, 5]).tolist() == [1, 2]
    assert counting.places("a foo", ids, [2]) is None, "the space and the word are one token"


def test_tokenizers_whose_tokens_are_not_bytes_are_not_counted() -> None:
    class Own(PreTrainedTokenizerFast):
        def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super().__call__([each.lower() for each in text], *args, **kwargs)

    spaced = tokenizer()
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    few = tokenizer()
    few.backend_tokenizer.model = BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>")
    lowered = tokenizer(normalizers.Lowercase())
    of_words = tokenizer(split=pre_tokenizers.Metaspace())
    sentence = tokenizer_for(ALL_TEMPLATES["mistral v1"])
    own = Own(tokenizer_object=tokenizer().backend_tokenizer)
    assert [ByteTokens.of(tokens) for tokens in (spaced, few, lowered, of_words, sentence, own)] == [None] * 6


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_rows_have_the_tokens_and_targets_of_offsets(name: str) -> None:
    tokens = tokenizer_for(ALL_TEMPLATES[name])
    layout = Layout(LAYOUTS["messages"], {"messages": "messages", "tools": "tools"})
    given = [(CONVERSATIONS[kind], TOOLS if "tools" in kind else None) for kind in kinds_of(name)]
    rows: list[Any] = [{"messages": messages, "tools": tools} for messages, tools in given]
    counting = ByteTokens.of(tokens)
    assert (counting is None) == (ALL_TEMPLATES[name].metaspace is not None)
    for document, (messages, tools) in zip(Encoder(tokens).documents(rows, layout), given, strict=True):
        rendered = render(tokens, messages, tools, "assistant")
        if rendered.turns is not None:
            continue
        expected = tokens(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        assert document["input_ids"].tolist() == expected["input_ids"]
        assert document["targets"].tolist() == target_mask(rendered.spans, expected["offset_mapping"])
        if counting is not None:
            assert counting.places(rendered.text, document["input_ids"], rendered.spans[0]) is not None


def test_settings_of_an_earlier_call_do_not_count() -> None:
    tokens = tokenizer()
    counting = ByteTokens.of(tokens)
    assert counting is not None
    tokens.backend_tokenizer.enable_truncation(2)
    tokens.backend_tokenizer.enable_padding(length=9)
    [found] = counting.encode(["foo <|x|>"])
    assert found.tolist() == tokens("foo <|x|>", add_special_tokens=False)["input_ids"]
    tokens.split_special_tokens = True
    assert counting.encode(["<|x|>"])[0].tolist() == tokens("<|x|>", add_special_tokens=False)["input_ids"]
    assert len(counting.encode(["<|x|>"])[0]) == 5
