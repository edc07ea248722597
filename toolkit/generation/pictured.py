"""Prompts with images, as training has them: a place for each in the chat template, and transformers' processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import BadInputError
from toolkit.generation.complete import Message, Prompt, fitting, templated
from toolkit.generation.load import Loaded
from toolkit.paths import user_cache

if TYPE_CHECKING:
    from PIL import Image


def encode_pictured(loaded: Loaded, text: str, images: Sequence[Image.Image], system: str | None = None) -> Prompt:
    """The tokens that a completion follows, and what the model is given of the images, which stand before the text.

    Raises:
        BadInputError: the model or its chat template takes no images, or the prompt is too long.
    """
    from toolkit.data.picture_places import PICTURED, PLACE
    from toolkit.data.pictures import Pictures

    pictures = Pictures.of(loaded.tokenizer, user_cache())
    if pictures is None:
        raise BadInputError(
            f"{loaded.name!r} has no processor of images (preprocessor_config.json); leave --image out, or "
            "name a model that sees"
        )
    if loaded.tokenizer.chat_template is None:
        raise BadInputError(f"the tokenizer of {loaded.name!r} has no chat template, which says where they stand")
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": PLACE * len(images) + text})
    with_places = [{**message, PICTURED: pictures.token} for message in messages]
    written = templated(loaded.tokenizer, with_places)
    if written.count(pictures.token) != len(images):
        raise BadInputError(
            f"the chat template writes {written.count(pictures.token)} places for {len(images)} images; the "
            f"prompt must not hold {pictures.token}, and the template has to know images"
        )
    inputs = pictures.processor(text=[written], images=[list(images)], return_tensors="pt", add_special_tokens=False)
    ids = fitting(loaded, inputs.pop("input_ids")[0].tolist())
    inputs.pop("attention_mask", None)
    return Prompt(ids, [], dict(inputs))


def read_images(paths: Sequence[Path]) -> list[Image.Image]:
    """The images of the option. Raises BadInputError that names one that cannot be read."""
    if not paths:
        return []
    from toolkit.data.picture_files import content_of, decoded
    from toolkit.data.problem import RowProblem

    found = []
    for path in paths:
        try:
            found.append(decoded(content_of(path.expanduser())))
        except RowProblem as problem:
            raise BadInputError(f"--image: {str(path)!r}: {problem}") from problem
    return found
