"""Reads images that rows name or hold: inside their folder, of bounded size, and as transformers decodes them."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from PIL import Image, ImageOps, UnidentifiedImageError

from toolkit.data.rows.values import RowProblem

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that are read. Pillow knows more: for EPS it would run Ghostscript on an untrusted file."""

MAX_PIXELS = 2**26
"""The largest image: 256 MiB as RGB, twice that while it is decoded. A GIF of 29 bytes can claim as many, and
Pillow's own limit (warned of at 89 million, refused at twice that) would let it take 1.4 GiB."""

MAX_BYTES = 256 * 2**20
"""The largest file; an image of at most `MAX_PIXELS` needs no more."""

DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes whose values do not fit into 8 bits: converting to RGB would clip them at 255, mostly to white."""


def decoded(content: bytes) -> Image.Image:
    """Returns the image as RGB: turned as its EXIF says, without alpha, like `transformers.image_utils.load_image`.

    It is decoded whole, because only that finds a damaged one. So a row that is kept can be trained on.

    Raises:
        RowProblem: if the image is damaged, too large, or of an unsupported format.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _require_usable(image)
            ImageOps.exif_transpose(image, in_place=True)  # otherwise a copy, even of one that needs no turning
            return image.convert("RGB")
    except RowProblem:
        raise
    except UnidentifiedImageError as error:
        raise RowProblem(f"an image that is damaged or not one of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise RowProblem(_too_large()) from error
    except Exception as error:  # Pillow raises many types about a broken file
        raise RowProblem("an image that is damaged") from error


PREVIEW = 192
"""Longest side of a preview (pixels)."""


def preview(image: Image.Image) -> str:
    """Returns a small copy of an image for a page, as a `data:` URI; an image that is small already is lossless."""
    kind = "PNG" if max(image.size) <= PREVIEW // 2 else "JPEG"
    small, content = image.copy(), io.BytesIO()
    small.thumbnail((PREVIEW, PREVIEW))
    small.save(content, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def _require_usable(image: Image.Image) -> None:
    """Refuses by the header, before a pixel is decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise RowProblem(_too_large())
    # A phone's MPO is a photograph with a second view or a depth map after it, which readers leave out.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise RowProblem("an image of several frames or pages, of which only the first would be read")
    if image.mode in DEEP_MODES:
        raise RowProblem("an image with more than 8 bits a channel in grey; convert it to 8 bits")


def _too_large() -> str:
    return f"an image of more than {MAX_PIXELS:,} pixels; make it smaller"


def file_or_content(reference: Any, root: Path) -> Path | bytes:
    """Returns the file of an image inside of `root`, or the bytes that its row holds.

    Args:
        reference: a path, a `data:` URI, encoded bytes, or a mapping with `bytes`, `path` or `url` to one of these.
        root: the folder that relative paths start from, and that paths must not leave.

    Raises:
        RowProblem: if it is none of these, is missing, or is outside of `root`.
    """
    if isinstance(reference, Mapping):
        found = [reference[key] for key in ("bytes", "path", "url", "base64") if reference.get(key) is not None]
        if not found or isinstance(found[0], Mapping):
            raise RowProblem("an image without bytes, path or url")
        if reference.get("base64") is found[0]:
            return _decoded_base64(str(found[0]), "an image whose base64 text is damaged")
        return file_or_content(found[0], root)
    if isinstance(reference, bytes):
        return reference
    if not isinstance(reference, str) or not reference.strip():
        raise RowProblem("an image that is neither a path, a data: URI nor bytes")
    start, colon, rest = reference.partition(":")
    scheme = start.lower() if colon else ""
    if scheme == "data":
        return _decoded_data_uri(reference)
    if scheme in ("http", "https"):
        raise RowProblem("an image at an http address, which is not fetched; download it and name its path")
    return _file_inside(unquote(rest.removeprefix("//")) if scheme == "file" else reference, root)


def content_of(path: Path) -> bytes:
    """Returns the bytes of an image's file.

    Raises:
        RowProblem: if it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RowProblem(f"an image that cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise RowProblem(_too_large())
    return content


def _decoded_data_uri(uri: str) -> bytes:
    """Returns the bytes of `data:image/png;base64,...`; line ends in the base64 text are allowed."""
    head, comma, text = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RowProblem("an image in a data: URI that is not base64")
    return _decoded_base64(text, "an image in a data: URI whose base64 text is damaged")


def _decoded_base64(text: str, problem: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowProblem(problem) from error


def _file_inside(name: str, root: Path) -> Path:
    """Returns the file of this name, with links followed, if it is in `root`."""
    try:
        path = (root / name).resolve()
        inside, is_file = path.is_relative_to(root.resolve()), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, a null character
        raise RowProblem("an image whose path cannot be read") from error
    if not inside:
        raise RowProblem("an image whose path leads out of the folder of the rows, or out of data.image_root")
    if not is_file:  # a pipe or a device could block forever
        raise RowProblem("an image that is missing")
    return path
