"""Keeps the files next to a base's weights as they were when training began; an export has them, too.

They are held in memory (some megabytes, most of it the tokenizer), on rank 0: a base that changes or goes while its run
trains changes nothing in the export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.data.rows.hub_refusals import download
from toolkit.paths import parse_json, read_foreign
from toolkit.recipe.schema import ModelSection
from toolkit.terminal import LongAction, Terminal

CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
CHAT_TEMPLATE, PROCESSOR_TEMPLATE, TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"

TOKENIZERS = (
    "tokenizer*",
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    "chat_template.*",
    f"{TEMPLATES}/*.jinja",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
"""Files of a tokenizer, of all kinds that transformers and servers read."""

PROCESSORS = ("*processor_config.json",)
"""Files with the settings for images and sound."""

LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")

CODE = ("*.py",)
"""Code of a model's own, which config.json names. It is copied if it may run (`model.trust_remote_code`)."""

BESIDE_ADAPTER = (*TOKENIZERS, *PROCESSORS)
"""Files of a base that an exported adapter has, too."""

BESIDE_WEIGHTS = (CONFIG, GENERATION, *TOKENIZERS, *PROCESSORS, *LICENCES)
"""Files of a base that its export has, too."""


@dataclass(frozen=True)
class BaseFiles:
    """Files next to the weights of a base.

    Attributes:
        contents: the content of each file by its name, which is relative to the folder.
        paths: where each file was read.
    """

    contents: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, patterns: Sequence[str] = BESIDE_WEIGHTS) -> BaseFiles:
        """Reads the files of a folder whose names match. Raises OSError if one cannot be read."""
        found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
        paths = {path.relative_to(folder).as_posix(): path for path in found}
        return cls({name: read_foreign(path) for name, path in paths.items()}, paths)

    def matching(self, patterns: Sequence[str]) -> BaseFiles:
        """Returns those of the files whose names match."""
        return self._only([name for name in self.contents if any(fnmatch(name, pattern) for pattern in patterns)])

    def without(self, patterns: Sequence[str]) -> BaseFiles:
        """Returns the other files."""
        left_out = self.matching(patterns).contents
        return self._only([name for name in self.contents if name not in left_out])

    def _only(self, names: Sequence[str]) -> BaseFiles:
        paths = {name: self.paths[name] for name in names if name in self.paths}
        return BaseFiles({name: self.contents[name] for name in names}, paths)

    def same_folder(self, name: str, other: str) -> bool:
        """Tells whether a file was read in the folder of another one, which may not exist."""
        return name in self.paths and (other not in self.paths or self.paths[name].parent == self.paths[other].parent)

    def __or__(self, others: BaseFiles) -> BaseFiles:
        return BaseFiles(self.contents | others.contents, self.paths | others.paths)

    def fields(self, name: str) -> dict[str, Any] | None:
        """Returns what a JSON file says; None without the file, or if it holds no JSON object."""
        try:
            found = parse_json(self.contents[name])
        except (KeyError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def text(self, name: str) -> str | None:
        """Returns a file's text; None without the file."""
        return self.contents[name].decode("utf-8", "replace") if name in self.contents else None

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of each file."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}

    def changes(self) -> Iterator[str]:
        """Yields a sentence for each file that has changed or gone since it was read."""
        for name, path in self.paths.items():
            try:
                if read_foreign(path) != self.contents[name]:
                    yield f"{name} of {str(path.parent)!r} has changed since training began"
            except OSError:
                yield f"{name} of {str(path.parent)!r} is gone or cannot be read"


def base_files(model: ModelSection) -> BaseFiles:
    """Returns the files next to the weights that an export has, too, on rank 0; none on other ranks.

    They are the base's, with the tokenizer of `model.tokenizer` and, for random weights, the processor next to it.

    Raises:
        BadInputError: if they cannot be downloaded.
    """
    found, code = BaseFiles(), CODE if model.trust_remote_code else ()
    if model.name_or_path is not None:
        folder = model_folder(model)
        found = BaseFiles.read(folder, (*BESIDE_WEIGHTS, *code)) if ranks.rank() == 0 else found
    if model.tokenizer is not None:
        patterns = (*TOKENIZERS, *code) if model.name_or_path is not None else (*BESIDE_ADAPTER, *LICENCES, *code)
        folder = _folder(model.tokenizer, None, patterns, "model.tokenizer")
        if ranks.rank() == 0:
            found = found.without(TOKENIZERS) | BaseFiles.read(folder, patterns)
    return found


def model_folder(model: ModelSection, field: str = "model.name_or_path") -> Path:
    """Returns the folder of a pretrained model. Raises BadInputError, of `field`, if it cannot be downloaded."""
    assert model.name_or_path is not None
    # No pickles: those of a stranger could run anything.
    return _folder(model.name_or_path, model.revision, ["*.safetensors", "*.json", *BESIDE_WEIGHTS], field)


def _folder(name: str, revision: str | None, patterns: Sequence[str], field: str = "model.name_or_path") -> Path:
    """Returns a folder. For a hub name it holds the files of these patterns, downloaded once for each host."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    with LongAction(Terminal(quiet=ranks.rank() != 0), f"downloading {name}"):
        return ranks.on_each_host(lambda: download(name, field, revision, patterns))


def as_written(before: bytes | None, fields: dict[str, Any]) -> bytes:
    """Returns the content of a JSON file; the bytes that it had before, if it says the same.

    Args:
        before: the content of the base's file, or None without one.
        fields: what the file says now.
    """
    text = "" if before is None else before.decode("utf-8", "replace")
    try:
        if before is not None and parse_json(before) == fields:
            return before
    except ValueError:
        pass  # the base's own is broken
    first = text.lstrip().removeprefix("{").lstrip("\r\n")
    indent = len(first) - len(first.lstrip(" ")) if "\n" in text.strip() else 2
    end = "\n" if text.endswith("\n") else ""
    return (json.dumps(fields, indent=indent or 2, ensure_ascii=False) + end).encode()
