"""Tokens from `fastokens`, an optional package that reads the same rules as `tokenizers` and is many times as fast.

It may read rules otherwise. So its tokens are taken where they equal those of `tokenizers` for hard texts, for texts
with each added token and for the first rows, and of later rows one in about a thousand is encoded by both.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import version

from tokenizers import Tokenizer

from toolkit.errors import DataError, first_line

PACKAGE = "fastokens"

REFUSED = f"tokenizers, as {PACKAGE}"
"""Beginning of the reason why an installed package does not make the tokens."""

COMPARED = 16
"""Of so many calls, each with a batch of rows, one has a text compared."""

HARD = (
    "",
    "0 01 012 0123 01234 3.14159 1,000,000 ١٢٣ ½ ² ↉",
    "  two   three    four \t tab\t\ttabs \u00a0no break\u3000wide \u200bnone",
    "line\r\nline\rline\n\n\nline \n line\x0b\x0c\x1c\x85\u2028\u2029",
    "don't I'LL we\u2019ve they'd CAMELCase snake_case kebab-case x=y;z+=1 //# /* */ <|not_a_token|> </s> [INST]",
    "e\u0301 é u\u0308 ü \u212b \u1e9b\u0323 \ufb01 \u2167 \u2460 \ufdfa q\u0307\u0323",
    "\U0001f469\u200d\U0001f469\u200d\U0001f466 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd 1\ufe0f\u20e3 \u263a\ufe0f",
    "한국어 가\u1100\u1161 ภาษาไทยไม่มีช่องว่าง 日本語の文章、句読点。 简体中文",
    "עברית שלום العربية مرحبا بالعالم हिन्दी নমস্কার తెలుగు ქართული Ελληνικά Кириллица",
    "\u202eright to left\u202c \ufeffmark \ufffd \x00\x01\x7f \ud7ff\ue000\uffff \U0010ffff",
    "a" * 100_000,
    " " * 1000 + "x" + "\n" * 1000 + "!?" * 500 + "ab1 " * 500,
)
"""Texts of which tokenizers split each otherwise: digits, blanks, line ends, scripts, marks and what is no letter."""


class OtherTokensError(DataError):
    """A text has other tokens by `fastokens`, although those before had the same."""


class FastTokens:
    """Encodes texts without special tokens, by `fastokens` where it is proven, else by `tokenizers`.

    Attributes:
        way: the package that does, with the reason if `fastokens` is installed and does not.
        calls: of `encode`.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend, self.calls = backend, 0
        self._proven: set[bool] = set()
        try:
            self._fast = importlib.import_module(PACKAGE).Tokenizer.from_json_str(backend.to_str())
            self.way = f"{PACKAGE} {version(PACKAGE)}"
        except ImportError:
            self._fast, self.way = None, "tokenizers"
        except Exception as error:  # whatever it lacks
            self._fast, self.way = None, f"{REFUSED} cannot read the tokenizer ({first_line(error)})"

    def encode(self, texts: Sequence[str], splits: bool = False) -> list[list[int]]:
        """Returns the tokens of each text, each (length,).

        Args:
            splits: whether a special token that stands in a text is encoded as other words are.

        Raises:
            OtherTokensError: if a text has other tokens by `fastokens`, although those before had the same.
        """
        self.calls += 1
        if self._fast is not None and splits not in self._proven:
            self._prove(texts, splits)
        if self._fast is None:
            return self._slowly(texts, splits)
        if self.calls % COMPARED == 0 and texts:
            # Scripts with many bytes in a character are rare in most files, and differ most often.
            unusual = max(texts, key=lambda text: len(text.encode()) / (len(text) or 1))
            if self._differs(unusual, splits):
                raise OtherTokensError(
                    f"{self.way} and tokenizers have other tokens for a text that begins with {unusual[:60]!r}, "
                    f"and had the same before; uninstall {PACKAGE}, and train once more"
                )
        return self._fastly(texts, splits)

    def _prove(self, texts: Sequence[str], splits: bool) -> None:
        self._proven.add(splits)
        tokens = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        added = [
            text for each in tokens for text in (f"{each}a{each} {each} é {each}\n{each}{each}0{each}", f" {each} ")
        ]
        wrong = next((text for text in (*HARD, *added, *texts) if self._differs(text, splits)), None)
        if wrong is not None:
            self._fast, self.way = None, f"{REFUSED} has other tokens for {wrong[:60]!r}"

    def _differs(self, text: str, splits: bool) -> bool:
        return self._fastly([text], splits) != self._slowly([text], splits)

    def _fastly(self, texts: Sequence[str], splits: bool) -> list[list[int]]:
        # One by one: a batch would start threads, which a forked process lacks.
        return [self._fast.encode(text, split_special_tokens=splits).ids for text in texts]

    def _slowly(self, texts: Sequence[str], splits: bool) -> list[list[int]]:
        self._backend.no_truncation()  # another call may have set these
        self._backend.no_padding()
        self._backend.encode_special_tokens = splits
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
