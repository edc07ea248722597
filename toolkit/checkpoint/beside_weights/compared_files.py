"""Compares the files next to an export's weights with those of its base, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from toolkit.errors import ExportError, listed
from toolkit.model.beside_weights.base_files import (
    BESIDE_WEIGHTS,
    CHAT_TEMPLATE,
    CODE,
    CONFIG,
    GENERATION,
    TEMPLATES,
    TOKENIZER_CONFIG,
    BaseFiles,
)

DTYPE = "export.dtype"
LABELS = "the classes of the data"
TEMPLATE = "the chat template of the recipe"
TOKENS = "model.add_tokens"
PIXELS = "data.min_pixels, data.max_pixels"

REASONS: dict[str, dict[str, str]] = {
    CONFIG: {
        "vocab_size": TOKENS,
        "*.vocab_size": TOKENS,
        "*quantization_config*": "the exported weights are not quantised",
        "*torch_dtype": DTYPE,
        "*dtype": DTYPE,
        "architectures": "the class that was trained",
        "*tie_word_embeddings": "the trained head has a weight of its own",
        "*pad_token_id": "the token of padding, which a classifier needs",
        "id2label*": LABELS,
        "label2id*": LABELS,
        "*num_labels": LABELS,
        "problem_type": LABELS,
    },
    GENERATION: {
        "eos_token_id*": "the ends of an answer that were learned",
        "_from_model_config": "config.json does not have the ends that were learned",
    },
    TOKENIZER_CONFIG: {
        "chat_template*": TEMPLATE,
        "added_tokens_decoder*": TOKENS,
        "additional_special_tokens": TOKENS,
        "extra_special_tokens": TOKENS,
    },
    "tokenizer.json": {"added_tokens": TOKENS},
    "special_tokens_map.json": {"additional_special_tokens": TOKENS},
    "added_tokens.json": {"*": TOKENS},
    "chat_template.json": {"chat_template": TEMPLATE},
    "*processor_config.json": {"*size*": PIXELS, "*min_pixels": PIXELS, "*max_pixels": PIXELS},
}
"""Why a key may differ from the base's, by patterns of the file and of the key."""

TABLES = ("added_tokens_decoder.", "id2label.", "label2id.")
"""Keys whose entries are not listed one by one."""

LONGEST = 90
"""Longer changes are shown by their key alone (characters)."""

WITHOUT_CONFIG = "the config.json next to it, by which transformers 5 finds the class, is not there"
"""Why `tokenizer_class` may differ."""

MAY_GO = ("*quantization_config*", "_from_model_config", "id2label*", "label2id*", "*min_pixels", "*max_pixels")
"""Keys of a base that an export may lack."""

FURTHER_TEMPLATES = f"{TEMPLATES}/*"
"""Files that the recipe's one chat template replaces, with that of `CHAT_TEMPLATE`."""

WHOLE = {
    CHAT_TEMPLATE: TEMPLATE,
    FURTHER_TEMPLATES: TEMPLATE,
    GENERATION: "the base's is not JSON",
}
"""Why a file that is not JSON may differ."""


def compare_files(before: BaseFiles, export: Path) -> list[str]:
    """Compares an export's configuration, generation settings, tokenizer and processors with those of its base.

    Args:
        before: those files of the base that the export should have, as they were when training began.
        export: the folder of the export.

    Returns:
        What differs and why, a line for each file and reason.

    Raises:
        ExportError: if a file or a key is missing, or differs without a reason.
    """
    after, alone = BaseFiles.read(export, (*BESIDE_WEIGHTS, *CODE)), not before.same_folder(CONFIG, TOKENIZER_CONFIG)
    explained: dict[tuple[str, str], list[str]] = {}
    wrong = []
    for name in sorted(before.contents):
        for key, old, new in _differences(name, before, after):
            reason = WITHOUT_CONFIG if key == "tokenizer_class" and alone else _reason(name, key, new is None)
            change = f"{key} is {new or 'missing'} instead of {old or 'none'}".lstrip()
            if reason is None:
                wrong.append(f"{name}: {change}")
            else:
                is_short = len(change) <= LONGEST and not key.startswith(TABLES)
                shown = change if is_short else key.split(".")[0] or "all"
                said = explained.setdefault((name, reason), [])
                if shown not in said:  # of a table once
                    said.append(shown)
    if wrong:
        raise ExportError(
            f"{str(export)!r} differs from its base in what training did not change: {listed(wrong)}; other loaders "
            "may read another model from it"
        )
    return [f"{name}: {listed(changes)} ({reason})" for (name, reason), changes in explained.items()]


def _differences(name: str, before: BaseFiles, after: BaseFiles) -> Iterator[tuple[str, str | None, str | None]]:
    """Yields key, value before and value after of what differs in a file; None without a value, "" for a whole file."""
    if before.contents[name] == after.contents.get(name):
        return
    said, says = before.fields(name), after.fields(name)
    if name not in after.contents or said is None or says is None:
        yield "", "the base's", "another one" if name in after.contents else None
        return
    olds, news = (dict(_flat(fields)) for fields in (said, says))
    for key in sorted(olds.keys() | news.keys()):
        if olds.get(key) != news.get(key) or (key in olds) != (key in news):
            old, new = (repr(each[key]) if key in each else None for each in (olds, news))
            yield key, old, new


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _reason(name: str, key: str, gone: bool) -> str | None:
    """Returns why a key may differ, or None if it may not."""
    if not key:
        may_differ = not gone or fnmatch(name, FURTHER_TEMPLATES)
        return None if not may_differ else next((why for pattern, why in WHOLE.items() if fnmatch(name, pattern)), None)
    reasons = next((each for pattern, each in REASONS.items() if fnmatch(name, pattern)), {})
    if gone and not any(fnmatch(key, pattern) for pattern in MAY_GO):
        return None
    return next((why for pattern, why in reasons.items() if fnmatch(key, pattern)), None)
