"""Prompts with images, as training has them: a place for each in the chat template, and transformers' processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import BadInputError
from toolkit.generation.complete import Prompt, fitting
from toolkit.generation.load import Loaded
from toolkit.paths import user_cache

if TYPE_CHECKING:
    from PIL import Image


def encode_pictured(loaded: Loaded, text: str, images: Sequence[Path], system: str | None = None) -> Prompt:
    """The tokens that a completion follows, and what the model is given of the images, which stand before the text.

    Raises:
        BadInputError: the model reads no images, an image cannot be read, or the prompt is too long.
    """
    from toolkit.data.picture_places import PICTURED, PLACE
    from toolkit.data.pictures import Pictures
    from toolkit.data.templates import rendered

    pictures = Pictures.of(loaded.tokenizer, user_cache())
    if pictures is None:
        raise BadInputError(
            f"--image: {loaded.name!r} has no processor of images (preprocessor_config.json); leave --image out, or "
            "name a model that sees"
        )
    if loaded.tokenizer.chat_template is None:
        raise BadInputError(
            f"--image: the tokenizer of {loaded.name!r} has no chat template, which says where they stand"
        )
    read = [_read(image) for image in images]
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": PLACE * len(read) + text})
    with_places = [{**message, PICTURED: pictures.token} for message in messages]
    written = rendered(loaded.tokenizer, with_places, prompt=True)
    if written.count(pictures.token) != len(read):
        raise BadInputError(
            f"--image: the chat template writes {written.count(pictures.token)} places for {len(read)} images; the "
            f"prompt must not hold {pictures.token}, and the template has to know images"
        )
    inputs = pictures.processor(text=[written], images=[read], return_tensors="pt", add_special_tokens=False)
    ids = fitting(loaded, inputs.pop("input_ids")[0].tolist())
    inputs.pop("attention_mask", None)
    return Prompt(ids, [], dict(inputs))


def _read(path: Path) -> Image.Image:
    from toolkit.data.picture_files import content_of, decoded
    from toolkit.data.problem import RowProblem

    try:
        return decoded(content_of(path.expanduser()))
    except RowProblem as problem:
        raise BadInputError(f"--image: {str(path)!r}: {problem}") from problem
