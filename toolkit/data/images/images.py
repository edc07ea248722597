"""Turns a row's references to images into the text and tensors of the model's processor.

The processor is transformers' own. It decides which tokens stand for an image, and makes its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from toolkit.data.images.image_files import content_of, decoded, file_or_content
from toolkit.data.images.pixel_limits import CONFIGURATIONS, NO_LIMITS, PixelLimits
from toolkit.data.layouts.messages import Span
from toolkit.data.rows.cache import digest
from toolkit.data.rows.files import local_path
from toolkit.data.rows.hub_refusals import hub_error
from toolkit.data.rows.sources import ROWS_LOOKED_AT
from toolkit.data.rows.values import RowProblem
from toolkit.errors import BadInputError, DataError, first_line, in_words
from toolkit.paths import install_command
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection

PREFIX = "picture/"
"""Key prefix of the processor's tensors in a batch."""

SMALLEST = (56, 56)
"""Width and height of the image that is added to a micro-batch without one (pixels); the processor resizes it."""


@dataclass(frozen=True)
class Expanded:
    """A text in which each image is expanded.

    Attributes:
        spans: spans of the targets in this text (characters).
        records: the record of each image, as JSON.
    """

    text: str
    spans: list[Span]
    records: tuple[str, ...]


_SOURCE = "pictures_of"


def set_source(
    tokenizer: PreTrainedTokenizerBase, name: str | None, revision: str | None, limits: PixelLimits = NO_LIMITS
) -> None:
    """Stores on the tokenizer which model it belongs to, for `Images.of`.

    Args:
        name: name of the model, or None for random weights, which take no images.
        limits: the limits that the recipe sets.
    """
    setattr(tokenizer, _SOURCE, None if name is None else (name, revision, limits))


def limits_of(tokenizer: PreTrainedTokenizerBase) -> PixelLimits:
    """Returns the limits that `set_source` stored."""
    return NO_LIMITS if (source := getattr(tokenizer, _SOURCE, None)) is None else source[2]


def image_tokens_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the tokens that the tokenizer's model replaces by image features, as far as its files name them.

    They are found without the processor, which needs packages that rows of text do not.
    """
    found = {getattr(tokenizer, "image_token_id", None)}
    if (source := getattr(tokenizer, _SOURCE, None)) is not None:
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(source[0], "config.json", revision=source[1], **quiet)
        fields = json.loads(Path(file).read_text(encoding="utf-8")) if file is not None else {}
        found |= {fields.get(name) for name in ("image_token_id", "image_token_index") if isinstance(fields, dict)}
    return frozenset(token for token in found if isinstance(token, int))


@dataclass(frozen=True)
class Images:
    """Reads images for one model.

    Attributes:
        name: the model: a folder, or a name on the hub.
        revision: revision of a model on the hub.
        store: folder of the cache for images that rows hold themselves.
        identity: digest that identifies the processor.
        limits: limits of the number of pixels that an image is scaled to.
        held: digest -> an image that a row holds itself, for a stream, which may be larger than the disk; None to copy
            them to `store`.
    """

    name: str
    revision: str | None
    store: Path
    identity: str
    limits: PixelLimits = NO_LIMITS
    held: dict[str, bytes] | None = None
    _sizes: dict[tuple[int, int], str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Images | None:
        """Returns the reader for the tokenizer's model, or None if it has no image processor."""
        if (source := getattr(tokenizer, _SOURCE, None)) is None:
            return None
        name, revision, limits = source
        found = [
            cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
            for file in CONFIGURATIONS
        ]
        contents = [Path(path).read_text(encoding="utf-8") for path in found if path is not None]
        if not any('"image_processor' in content for content in contents):
            return None
        known_by = [contents, [limits.smallest, limits.largest]] if limits else contents
        return cls(name, revision, cache / "pictures", digest("processor", known_by), limits)

    @cached_property
    def processor(self) -> Any:
        """transformers' processor.

        Raises:
            BadInputError: if it cannot be loaded, or cannot keep to the limits.
        """
        from transformers import AutoProcessor  # of a third of the libraries' import, which rows of text do not need

        try:
            # Never code from the hub: a custom processor would need model.trust_remote_code here, too.
            processor = AutoProcessor.from_pretrained(self.name, revision=self.revision)
        except ImportError as error:
            raise BadInputError(
                f"data.train has images, and the processor of {self.name!r} needs a package that is not installed "
                f"({in_words(error)}): {install_command('vision')}"
            ) from error
        except Exception as error:  # transformers raises many types about a broken file
            raise hub_error(error, "model.name_or_path", self.name, revision=self.revision) or BadInputError(
                f"data.train has images, and no processor can be loaded from {self.name!r}: {in_words(error)}; correct "
                "its preprocessor_config.json or processor_config.json, or download them again"
            ) from error
        if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_processor"):
            raise BadInputError(
                f"data.train has images, and the processor of {self.name!r} ({type(processor).__name__}) names no "
                "token that stands for one, so that none can be placed; name another model, or remove the images"
            )
        if self.limits:
            self.limits.apply(processor, self.name)
        return processor

    @property
    def token(self) -> str:
        """The token that a chat template writes for an image, which is then expanded."""
        return str(self.processor.image_token)

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """The tokens that the model replaces by image features."""
        return frozenset(int(token) for token in self.processor.image_token_ids if token is not None)

    def expansion(self, image: Image.Image) -> str:
        """Returns the text that stands for an image before tokenising. It depends on the image's size alone.

        Raises:
            RowProblem: if the processor takes no image of this size.
        """
        if image.size not in self._sizes:
            processor = self.processor
            try:
                found = processor(text=[self.token], images=[[image]], return_text_replacement_offsets=True)
            except Exception as error:  # the model's own code: Qwen's refuses an image 200 times as wide as high
                raise RowProblem(f"an image that the model's processor does not take: {first_line(error)}") from error
            ((replaced,),) = found["text_replacement_offsets"]
            self._sizes[image.size] = str(replaced["replacement"])
        return self._sizes[image.size]

    @cached_property
    def smallest(self) -> tuple[Image.Image, list[int]]:
        """A small image, and the tokens that stand for it."""
        image = Image.new("RGB", SMALLEST, (127, 127, 127))
        ids = self.processor.tokenizer(self.expansion(image), add_special_tokens=False)["input_ids"]
        return image, list(ids)

    def record(self, reference: Any, root: Path) -> tuple[dict[str, Any], Image.Image]:
        """Returns the record of a row's image, with its place and digest, and the image.

        Args:
            root: folder that paths start from.

        Raises:
            RowProblem: if it cannot be read.
        """
        found = file_or_content(reference, root)
        content = found if isinstance(found, bytes) else content_of(found)
        image = decoded(content)
        known_by = _digest(content)
        facts: dict[str, Any] = {"digest": known_by, "size": image.size, "bytes": len(content)}
        if isinstance(found, Path):
            facts["path"] = str(found.relative_to(root.resolve()))
        else:
            self._keep_content(content, known_by)
        return facts, image

    def expanded(self, text: str, spans: list[Span], references: Sequence[Any], root: Path) -> Expanded:
        """Expands each image's token in a text that the chat template wrote.

        Args:
            spans: spans of the targets (characters).
            references: the row's references to its images.
            root: folder that paths start from.

        Raises:
            RowProblem: if an image cannot be read or is in a target, or there are more or fewer places than images.
        """
        pieces = text.split(self.token)
        if len(pieces) - 1 != len(references):
            raise RowProblem("the chat template writes more or fewer places for images than the row has images")
        found = [self.record(reference, root) for reference in references]
        expansions = [self.expansion(image) for _, image in found]
        ends = list(accumulate(len(piece) + len(self.token) for piece in pieces[:-1]))
        if any(start < end and last > end - len(self.token) for end in ends for start, last in spans):
            raise RowProblem("an image is in what is learned")
        longer = [len(expansion) - len(self.token) for expansion in expansions]
        moves = [sum(more for end, more in zip(ends, longer, strict=True) if end <= start) for start, _ in spans]
        moved = [(start + by, end + by) for (start, end), by in zip(spans, moves, strict=True)]
        whole = "".join(part for pair in zip_longest(pieces, expansions, fillvalue="") for part in pair)
        return Expanded(whole, moved, tuple(json.dumps(record) for record, _ in found))

    def _keep_content(self, content: bytes, known_by: str) -> None:
        if self.held is not None:
            self.held[known_by] = content
            return
        place = self.store / known_by
        # Compared whole, because a copy that was cut short would stay so for as long as the cache.
        if place.is_file() and _digest(place.read_bytes()) == known_by:
            return
        self.store.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_name(f".{known_by}.{os.getpid()}.{threading.get_ident()}.tmp")
        unfinished.write_bytes(content)
        os.replace(unfinished, place)

    def read(self, record: dict[str, Any], root: str, row: str, cached: Path | None) -> Image.Image:
        """Reads the image of a record, which has it under `content` if it is in no file.

        Args:
            row: name of the row, for errors.
            cached: the folder of the row's tokens in the cache, for errors; None for a streamed row.

        Raises:
            DataError: if the file is gone, or differs from the one when the rows were read.
        """
        path = self._place(record, root)
        try:
            content = record["content"] if "content" in record else content_of(path)
            if _digest(content) == record["digest"]:
                return decoded(content)  # another version may have taken what this one refuses
        except RowProblem as problem:
            raise DataError(f"{row}: {str(path)!r}: {problem}; {_mend(cached)}") from problem
        raise DataError(f"{row}: {str(path)!r} is another image than when the rows were read; {_mend(cached)}")

    def require_there(self, record: dict[str, Any], root: str, row: Callable[[], str], cached: Path | None) -> None:
        """Checks, without reading it, that the file of a record is there, and as long as when the rows were read.

        Args:
            row: returns the name of the row, for errors.
            cached: as for `read`.

        Raises:
            DataError: if it is not.
        """
        path = self._place(record, root)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{row()}: {str(path)!r}: an image that cannot be read: {error.strerror}; {_mend(cached)}"
            ) from error
        if size != record.get("bytes", size):  # older versions did not record it
            raise DataError(f"{row()}: {str(path)!r} is another image than when the rows were read; {_mend(cached)}")

    def _place(self, record: dict[str, Any], root: str) -> Path:
        """Returns the file of a record: the one that its row names, or the copy of one that its row holds."""
        return Path(root, record["path"]) if "path" in record else self.store / record["digest"]

    def tensors(self, rows: Sequence[Sequence[Image.Image]]) -> dict[str, torch.Tensor]:
        """Returns the model's tensors for the images of rows, under `PREFIX` and the processor's names.

        Their shapes are the processor's, for example (patches, values) and (images, 3) in Qwen-VL's.

        Args:
            rows: the images of each row; no row is without one.
        """
        texts = [self.token * len(images) for images in rows]
        found = self.processor(text=texts, images=[list(images) for images in rows], return_tensors="pt", padding=True)
        of_text = {*self.processor.tokenizer.model_input_names, "token_type_ids", "mm_token_type_ids"}
        # Llama 4's are bfloat16 whatever the model is; a model casts its inputs to its own dtype, or FSDP does.
        whole = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
        return {f"{PREFIX}{name}": tensor for name, tensor in whole.items() if name not in of_text}


def parse(records: Sequence[str]) -> list[dict[str, Any]]:
    """Parses records, one JSON text each."""
    return [json.loads(record) for record in records]


def _mend(cached: Path | None) -> str:
    if cached is None:
        return "bring the old one back, or resume the run, which reads the rows anew"
    return f"bring the old one back, or delete {str(cached)!r} and start again, which reads the rows anew"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# ---- what a recipe with images may set ----


def why_unread(objective: ObjectiveSection, has_processor: bool, with_images: bool) -> str:
    """Returns why images of a source are not read, and what to do, for the report.

    Args:
        has_processor: whether the model has an image processor.
        with images: whether images of this source are read, where they are looked for.
    """
    if with_images:
        return "where none is looked for; put it into the column images of the row, or into the message's content"
    if not objective.spec.sees_images:
        return f"and objective.kind={objective.kind} reads no images; leave such rows out"
    if not has_processor:
        return (
            "and the model's folder has no image processor; name a model that reads images in model.name_or_path, or "
            "leave such rows out"
        )
    return (
        f"and images are read if one of the first {ROWS_LOOKED_AT} rows has one in the column images or image, or in a "
        "message's content; put such a row first"
    )


def require_built(data: DataSection, source: str) -> None:
    """Checks that the recipe uses only what is built for rows with images.

    Args:
        source: name of the source that has some.

    Raises:
        DataError: if it sets something else.
    """
    if data.targets == "all":
        raise DataError(
            f"data.targets: all would learn the tokens that stand for images ({source}); set data.targets=assistant"
        )
    if data.long_rows in ("truncate", "split"):
        raise DataError(
            f"data.long_rows: {data.long_rows} would cut a row inside an image or after it ({source}); set "
            "data.long_rows=drop, or raise data.max_length"
        )


def require_root(data: DataSection) -> None:
    """Checks that the folder of images that the recipe names is there.

    Raises:
        DataError: if it is not.
    """
    if data.image_root is None or (folder := local_path(data.image_root)).is_dir():
        return
    found = "is not a folder" if folder.exists() else "does not exist"
    raise DataError(
        f"data.image_root: {data.image_root!r} {found} ({str(folder.absolute())!r}); name the folder that the paths of "
        "images in the rows start from"
    )


def require_effect(data: DataSection, with_images: Callable[[], bool]) -> None:
    """Checks that settings of images have an effect: some row has an image that the model gets.

    Args:
        with_images: returns whether images of some source are read; only called if the recipe has such a setting.

    Raises:
        DataError: if the recipe has such a setting and no row has such an image.
    """
    limits = PixelLimits.of(data)
    fields = [field for field in (limits.fields, data.image_root and "data.image_root") if field]
    if fields and not with_images():
        raise DataError(
            f"{' and '.join(fields)} has no effect: the model reads no image of the rows (of conversations, for a "
            "model with an image processor); remove it"
        )
