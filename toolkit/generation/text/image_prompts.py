"""Encodes prompts with images as training does, by the chat template and transformers' processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.rows.examples import Message
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Prompt, Shown, after_system, fitting, templated
from toolkit.generation.text.load import Loaded
from toolkit.paths import user_cache

if TYPE_CHECKING:
    from PIL.Image import Image


def asked_of(text: str, images: int) -> list[Message]:
    """Returns a user's turn with the images before the text."""
    from toolkit.data.rows.image_places import PLACE

    return [{"role": "user", "content": PLACE * images + text}]


def encode_with_images(
    loaded: Loaded,
    messages: list[Message],
    images: Sequence[Path | bytes],
    system: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Prompt:
    """Encodes a prompt, with the tokens of each image in its place.

    Args:
        messages: messages with `image_places.PLACE` in the text for each image.
        images: files or contents of the images, in the order of their places.
        system: put before messages that have no system text of their own.
        arguments: arguments of the chat template.

    Raises:
        BadInputError: if an image cannot be read, the model or its chat template takes none, or the prompt is too long.
    """
    from toolkit.data.images.images import Images
    from toolkit.data.rows.image_places import WITH_IMAGES
    from toolkit.data.rows.values import RowProblem
    from toolkit.data.templates.prompts import prompt_ids

    reader = Images.of(loaded.tokenizer, user_cache())
    if reader is None:
        raise BadInputError(
            f"{loaded.name!r} has no processor of images (preprocessor_config.json); leave the images out, or "
            "name a model that sees"
        )
    if loaded.tokenizer.chat_template is None:
        raise BadInputError(f"the tokenizer of {loaded.name!r} has no chat template, which says where images stand")
    with_places = [{**message, WITH_IMAGES: reader.token} for message in after_system(messages, system)]
    written = templated(loaded.tokenizer, with_places, tools, arguments or {})
    first, *others = written.split(reader.token)
    if len(others) != len(images):
        raise BadInputError(
            f"the chat template writes {len(others)} places for {len(images)} images; the "
            f"prompt must not hold {reader.token}, and the template has to know images"
        )
    decode = partial(_decoded, tuple(images))
    try:
        expansions = [reader.expansion(image) for image in decode()]
    except RowProblem as problem:
        raise BadInputError(str(problem)) from problem
    text = first + "".join(part for pair in zip(expansions, others, strict=True) for part in pair)
    return Prompt(fitting(loaded, prompt_ids(loaded.tokenizer, text, None)), [], Shown(reader, decode))


def _decoded(images: Sequence[Path | bytes]) -> list[Image]:
    """Decodes images. Raises BadInputError for one that cannot be read."""
    from toolkit.data.images.image_files import content_of, decoded
    from toolkit.data.rows.values import RowProblem

    found = []
    for image in images:
        try:
            found.append(decoded(image if isinstance(image, bytes) else content_of(image)))
        except RowProblem as problem:
            raise BadInputError(f"{problem}{'' if isinstance(image, bytes) else f' ({image})'}") from problem
    return found


def require_images(paths: Sequence[Path]) -> list[Path]:
    """Checks the images of the option `--image` and returns them.

    Raises:
        BadInputError: names an image that cannot be read.
    """
    images = [path.expanduser() for path in paths]
    try:
        _decoded(images)
    except BadInputError as problem:
        raise BadInputError(f"--image: {problem}") from problem
    return images
