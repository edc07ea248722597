"""Tokens of `fastokens` are taken where they are those of `tokenizers`, and no others are trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.conversations import ALL_TEMPLATES, tokenizer_for
from support.texts import write_rows
from test_build import TEXTS, rows_of, section
from test_byte_tokens import KINDS, tokenizer
from tokenizers import Tokenizer

from toolkit.data import build
from toolkit.data.documents import fast_tokens, processes
from toolkit.data.documents.byte_tokens import ByteTokens
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import DataError


class Fast(ModuleType):
    """A stand-in of the package: it gives the tokens of `tokenizers` but where a text has `wrong` in it."""

    def __init__(self, wrong: str = "nowhere", broken: bool = False) -> None:
        super().__init__("fastokens")
        self.Tokenizer, self.wrong, self.broken = self, wrong, broken

    def from_json_str(self, rules: str) -> Fast:
        if self.broken:
            raise ValueError("unknown pre-tokenizer\nat 3")
        self.backend = Tokenizer.from_str(rules)
        return self

    def encode(self, text: str, split_special_tokens: bool) -> Any:
        self.backend.encode_special_tokens = split_special_tokens
        return SimpleNamespace(ids=self.backend.encode(text, add_special_tokens=False).ids[self.wrong in text :])


def built(folder: Path, fast: ModuleType | None, monkeypatch: pytest.MonkeyPatch, texts: list[str] = TEXTS) -> Any:
    """The samples of rows made by a new tokenizer, the package that made the tokens, and the report's warnings."""
    monkeypatch.setitem(sys.modules, "fastokens", fast)
    monkeypatch.setattr(fast_tokens, "version", lambda name: "1.0")
    monkeypatch.setattr(processes, "BATCH_ROWS", 4)
    folder.mkdir()
    data = section(folder, write_rows(folder / "rows.jsonl", [{"text": text} for text in texts]))
    found = build.build(data, _train_byte_pairs(iter(TEXTS), 320), seed=0)
    report = found.report.to_dict()
    return rows_of(found.train), report["train"]["sources"][0]["tokens_by"], report["warnings"]


def test_what_the_package_cannot_read_or_reads_otherwise_is_left_to_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, by, others = built(tmp_path / "without", None, monkeypatch)
    assert by == "tokenizers"
    kinds = {
        "same": (Fast(), "fastokens 1.0"),
        "broken": (Fast(broken=True), "tokenizers, as fastokens cannot read the tokenizer (unknown pre-tokenizer)"),
        "special": (Fast("<|endoftext|>0"), "tokenizers, as fastokens has other tokens for '<|endoftext|>a<|endof"),
        "hard": (Fast("\U0001f44d\U0001f3fd"), "tokenizers, as fastokens has other tokens for '👩"),
        "rows": (Fast("number 2 "), f"tokenizers, as fastokens has other tokens for {TEXTS[2]!r}"),
    }
    for name, (fast, said) in kinds.items():
        rows, by, warnings = built(tmp_path / name, fast, monkeypatch)
        assert (rows, by.startswith(said)) == (expected, True), (name, by)
        assert warnings == (others if name == "same" else [*others, f"train: tokens are made by {by}"])


def test_a_later_row_with_other_tokens_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = 4 * fast_tokens.COMPARED - 2  # in a batch of which a row is compared
    texts = ["東京 in other bytes" if number == later else f"plain words {number}" for number in range(80)]
    with pytest.raises(DataError, match=r"rows\.jsonl, rows 61 to 64: fastokens 1\.0 and tokenizers have other tokens"):
        built(tmp_path / "later", Fast("東京 in"), monkeypatch, texts)


def test_the_package_itself_has_the_tokens_of_every_byte_level_tokenizer() -> None:
    """Of our templates' tokenizers and of all arrangements of the tests: equal in the hard texts, or not taken."""
    known = [tokenizer(**kind) for kind in KINDS.values()] + [tokenizer_for(each) for each in ALL_TEMPLATES.values()]
    counting = [found for each in known if (found := ByteTokens.of(each)) is not None]
    encoded = [found.encoder.encode(["a row"], splits) for found in counting for splits in (False, True)]
    assert ({found.encoder.way.split()[0] for found in counting}, len(encoded) > 20) == ({"fastokens"}, True)
