"""Which tokens of a text are learned, and whether a prompt has the tokens there that a server gives the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

PLAIN: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
"""Arguments of the tokenizer: a chat template writes its own special tokens, and long rows are dealt with later."""

TAILS = (24, 240)
"""Characters at the end of a prompt in which its last special token is looked for, before the whole prompt is read."""


def spans_array(spans: list[Span]) -> np.ndarray[Any, Any]:
    """Returns the spans, (n, 2), in less than half of numpy's own time for a list of tuples."""
    return np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).reshape(-1, 2)


def target_mask(spans: list[Span], offsets: list[Span] | np.ndarray[Any, Any]) -> list[bool]:
    """Returns which tokens are targets: those whose characters overlap a span.

    Args:
        spans: characters, sorted and disjoint.
        offsets: each token's characters, by rising start. Tokenizers that trim offsets give whitespace an empty
            span at its end: it counts as the character before that.
    """
    if not spans or not len(offsets):
        return [False] * len(offsets)
    starts, ends = np.asarray(offsets).T
    span_starts, span_ends = spans_array(spans).T
    # The first span that ends after the token's start, or the last span for a token after all spans.
    following = np.searchsorted(span_ends, np.minimum(starts, ends - 1), side="right")
    overlaps = span_starts[np.minimum(following, len(spans) - 1)] < ends
    return ((following < len(spans)) & overlaps).tolist()  # type: ignore[no-any-return]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of the tokenizer's special tokens, added ones included."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Returns the tokenizer's special tokens as text."""
    added = _added_special_tokens(tokenizer, len(tokenizer))
    return tuple(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *added]))


@lru_cache(maxsize=4)  # there can be thousands, and every row needs them
def _added_special_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tuple[str, ...]:
    """Returns the special tokens that were added to the vocabulary, now of `num_tokens` tokens."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def holds_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, ids: Sequence[int] | np.ndarray[Any, Any]) -> bool:
    """Returns whether the tokens `ids` of the beginning of a text are those of the prompt alone.

    Only the end of a prompt can have others: line ends of both may become one token. A special token is always one of
    its own, so that what comes before the prompt's last one needs no comparison.
    """
    tail = next((found for size in TAILS if (found := _tail(tokenizer, len(tokenizer), prompt[-size:]))), None)
    tail = tuple(tokenizer(prompt, **PLAIN)["input_ids"]) if tail is None else tail
    return tuple(ids[max(0, len(ids) - len(tail)) :]) == tail


@lru_cache(maxsize=4096)
def _tail(tokenizer: PreTrainedTokenizerBase, num_tokens: int, end: str) -> tuple[int, ...] | None:
    """Returns the tokens of a prompt's end from its last special token on, or None if it holds none."""
    places = [place for text in special_texts(tokenizer) if text and (place := end.rfind(text)) >= 0]
    return tuple(tokenizer(end[max(places) :], **PLAIN)["input_ids"]) if places else None
