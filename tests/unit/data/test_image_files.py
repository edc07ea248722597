"""Images are read as transformers reads them, or refused with the reason, whatever a row holds in their place."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from toolkit.data.images.image_files import MAX_PIXELS, content_of, decoded, file_or_content
from toolkit.data.rows.values import RowProblem

ORIENTATION = 0x0112
NOISE = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)


def read_image(reference: Any, root: Path) -> Image.Image:
    found = file_or_content(reference, root)
    return decoded(found if isinstance(found, bytes) else content_of(found))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(Image.fromarray(NOISE[..., :3]), kind, exif=exif)


def png_of_size(width: int, height: int) -> bytes:
    """An image that says it is so large, and holds nothing."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (head, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def frames(kind: str) -> bytes:
    first, second = (Image.fromarray(layer) for layer in (NOISE[..., 0], NOISE[..., 1]))
    return encoded(first, kind, save_all=True, append_images=[second])


WHOLE = encoded(Image.fromarray(NOISE[..., :3]))
JPEG = encoded(Image.fromarray(NOISE[..., :3]), "JPEG")
GREY_16 = Image.fromarray(NOISE[..., 0].astype(np.uint16) * 256)
GREY_FLOAT = Image.fromarray(NOISE[..., 0].astype(np.float32))
EPS = encoded(Image.fromarray(NOISE[..., :3]), "EPS")

GOOD = {
    "png": WHOLE,
    "jpeg": JPEG,
    "webp": encoded(Image.fromarray(NOISE[..., :3]), "WEBP", lossless=True),
    "bmp": encoded(Image.fromarray(NOISE[..., :3]), "BMP"),
    "tiff": encoded(Image.fromarray(NOISE[..., :3]), "TIFF"),
    "gif of one frame": encoded(Image.fromarray(NOISE[..., 0]), "GIF"),
    "alpha": encoded(Image.fromarray(NOISE)),
    "grey with alpha": encoded(Image.fromarray(NOISE).convert("LA")),
    "grey": encoded(Image.fromarray(NOISE[..., 0])),
    "one bit": encoded(Image.fromarray(NOISE[..., 0]).convert("1")),
    "palette with a transparent colour": encoded(Image.fromarray(NOISE[..., 0]).convert("P"), transparency=3),
    "cmyk": encoded(Image.fromarray(NOISE, "CMYK"), "JPEG"),
    "two views of a phone": encoded(
        Image.fromarray(NOISE[..., :3]), "MPO", save_all=True, append_images=[Image.fromarray(NOISE[..., 1:])]
    ),
    **{f"turned {i}": turned(i) for i in range(1, 9)},
    "turned jpeg": turned(6, "JPEG"),
}


def test_an_image_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    for name, content in GOOD.items():
        (tmp_path / "image").write_bytes(content)
        expected = np.asarray(load_image(str(tmp_path / "image")))
        uri = "data:image/png;base64," + base64.b64encode(content).decode()
        for reference in ("image", str(tmp_path / "image"), f"file://{tmp_path}/image", uri, content):
            read = read_image(reference, tmp_path)
            assert read.mode == "RGB", name
            np.testing.assert_array_equal(np.asarray(read), expected, name)


def test_an_image_on_its_side_is_stood_up(tmp_path: Path) -> None:
    """Orientation 6: the first row of what is stored is the right side of what is seen."""
    read = np.asarray(read_image(turned(6), tmp_path))
    assert read.shape == (7, 5, 3)
    np.testing.assert_array_equal(read[:, -1], NOISE[0, :, :3])


def test_alpha_is_left_out(tmp_path: Path) -> None:
    np.testing.assert_array_equal(np.asarray(read_image(GOOD["alpha"], tmp_path)), NOISE[..., :3])


FOUND = [
    {"bytes": WHOLE, "path": "gone.png"},
    {"bytes": None, "path": "in/a b.png"},
    {"path": "in/a b.png"},
    {"url": "data:image/png;base64," + base64.b64encode(WHOLE).decode(), "detail": "low"},
    {"url": "in/a b.png"},
    "in/../in/a b.png",
    "in/link.png",
    "data:;base64,\n" + base64.encodebytes(WHOLE).decode(),
    "DATA:image/png;BASE64," + base64.b64encode(WHOLE).decode(),
]


def test_an_image_is_found(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(WHOLE)
    (tmp_path / "in" / "link.png").symlink_to("a b.png")
    for reference in FOUND:
        np.testing.assert_array_equal(np.asarray(read_image(reference, tmp_path)), NOISE[..., :3])


def test_a_root_behind_a_link_is_a_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(WHOLE)
    (tmp_path / "link").symlink_to("real")
    assert read_image("a.png", tmp_path / "link").size == (7, 5)


DAMAGED, NO_IMAGE, UNFIT = "damaged", "damaged or not one of AVIF", "neither a path"
OUT, MISSING, FRAMES = "leads out", "missing", "several frames"
SCREEN = (
    b"GIF89a" + struct.pack("<HHBBB", 9000, 9000, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2D\1\0;"
)
"""A GIF of one pixel on a screen of 9,000 by 9,000."""

BAD: dict[str, tuple[Any, str]] = {
    # ---- what is no reference ----
    "nothing": (None, UNFIT),
    "empty": ("", UNFIT),
    "not a number": (float("nan"), UNFIT),
    "a list": (["a.png"], UNFIT),
    "an empty object": ({}, "without bytes"),
    "a number as path": ({"path": 7}, UNFIT),
    "a list as bytes": ({"bytes": [137, 80]}, UNFIT),
    # ---- paths ----
    "no such file": ("gone.png", MISSING),
    "a file as folder": ("good.png/a.png", "missing|cannot be read"),
    "a folder": ("folder", MISSING),
    "a pipe": ("pipe", MISSING),
    "a link to nothing": ("dangling", MISSING),
    "a link to itself": ("circle", "missing|cannot be read"),
    "above": ("../outside.png", OUT),
    "a link to above": ("way_out", OUT),
    "a folder's link to above": ("folder_out/outside.png", OUT),
    "from the top": ("/etc/passwd", OUT),
    "from the top, as a uri": ("file:///etc/passwd", OUT),
    "above, escaped": ("file:%2E%2E/outside.png", OUT),
    "a sibling whose name begins alike": ("../root_too/a.png", OUT),
    "a null character": ("a\0.png", "cannot be read"),
    "half a character": ("\ud800.png", "cannot be read"),
    "a long name": ("a" * 5000, "cannot be read"),
    # ---- addresses ----
    "http": ("http://127.0.0.1:9/a.png", "not fetched"),
    "http in an object": ({"url": "http://127.0.0.1:9/a.png"}, "not fetched"),
    "a uri without data": ("data:image/png;base64", "not base64"),
    "a uri of half a byte": ("data:image/png;base64,AAAAA", "base64 text is damaged"),
    "a uri of the web's alphabet": ("data:image/png;base64,-_-_", "base64 text is damaged"),
    "a uri of a page": ("data:text/html;base64," + base64.b64encode(b"<html></html>").decode(), NO_IMAGE),
    # ---- contents ----
    "no bytes": (b"", NO_IMAGE),
    "postscript": (EPS, NO_IMAGE),
    "a pointer in place of a large file": (b"version https://git-lfs.github.com/spec/v1\n", NO_IMAGE),
    "a beginning alone": (WHOLE[:8], NO_IMAGE),
    "half a png": (WHOLE[: len(WHOLE) // 2], DAMAGED),
    "a png with a flipped byte": (WHOLE[:60] + bytes([WHOLE[60] ^ 255]) + WHOLE[61:], DAMAGED),
    "a png without pixels": (png_of_size(4, 4), DAMAGED),
    "one pixel too many": (png_of_size(MAX_PIXELS + 1, 1), "more than 67,108,864 pixels"),
    "a gif of 29 bytes and a screen": (SCREEN, "more than 67,108,864 pixels"),
    "a bomb": (png_of_size(100_000, 100_000), "more than 67,108,864 pixels"),
    "a gif of two frames": (frames("GIF"), FRAMES),
    "a png of two frames": (frames("PNG"), FRAMES),
    "a tiff of two pages": (frames("TIFF"), FRAMES),
    "grey of 16 bits": (encoded(GREY_16), "8 bits"),
    "grey of floats": (encoded(GREY_FLOAT, "TIFF"), "8 bits"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a way out of each kind, to images that could be read."""
    above = tmp_path_factory.mktemp("above")
    root = above / "root"
    for folder in (root, root / "folder", above / "root_too"):
        folder.mkdir()
    for path in (root / "good.png", above / "outside.png", above / "root_too" / "a.png"):
        path.write_bytes(WHOLE)
    os.mkfifo(root / "pipe")
    for name, target in {
        "dangling": "gone",
        "circle": "circle",
        "way_out": "../outside.png",
        "folder_out": "..",
    }.items():
        (root / name).symlink_to(target)
    return root


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_image_is_refused_with_its_reason(root: Path) -> None:
    for reference, reason in BAD.values():
        with pytest.raises(RowProblem, match=reason):
            read_image(reference, root)
