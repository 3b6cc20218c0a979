"""Image files to RGB: formats, rotation, transparency, depths, and what is refused before it is decoded."""

from __future__ import annotations

import io
import random
import struct
import sys
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, PngImagePlugin
from planting import catches

from mlxspec.errors import ConfigError, ImageError
from mlxspec.images import pixels, source
from mlxspec.images.source import ImageLimits, decode_image, is_animated

LIMITS = ImageLimits()
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "GIF": {}}


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def flags(width: int = 7, height: int = 5) -> Image.Image:
    """Three colours, unlike under any rotation or reflection."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:2, :3], pixels[2:, 4:] = (255, 0, 0), (0, 0, 255)
    return Image.fromarray(pixels)


def values(data: bytes) -> np.ndarray:
    decoded = decode_image(data, LIMITS)
    assert decoded.mode == "RGB"
    return np.asarray(decoded)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_keep_every_pixel(kind: str) -> None:
    assert np.array_equal(values(file_of(flags(), kind, **LOSSLESS[kind])), flags())


def test_jpeg_is_close() -> None:
    image = Image.new("RGB", (32, 16), (200, 40, 90))
    assert np.abs(values(file_of(image, "JPEG", quality=95)).astype(int) - np.asarray(image)).max() < 6


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_rotation_is_applied(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: to be shown, the image is turned by 90 degrees clockwise
    image = Image.new("RGB", (32, 16), (250, 250, 250))
    image.paste((0, 0, 0), (0, 0, 16, 8))
    seen = values(file_of(image, kind, exif=exif))
    assert seen.shape == (32, 16, 3)
    assert seen[2, 13].max() < 60
    assert min(seen[2, 2].min(), seen[29, 13].min()) > 190


def test_damaged_exif_counts_as_absent() -> None:
    data = file_of(flags(), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(values(data), flags())


def test_transparent_pixels_are_blended_with_white() -> None:
    image = Image.new("RGBA", (3, 1))
    image.putpixel((0, 0), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    image.putpixel((2, 0), (0, 0, 0, 128))
    expected = [[10, 20, 30], [255, 255, 255], [127, 127, 127]]
    assert values(file_of(image)).tolist() == [expected]
    assert values(file_of(image, "WEBP", lossless=True, exact=True)).tolist() == [expected]
    assert values(file_of(image.convert("LA")))[0, 1].tolist() == [255, 255, 255]


def test_a_transparent_palette_entry_is_white() -> None:
    image = flags().quantize(4)
    index = image.getpixel((0, 0))
    for kind in ("PNG", "GIF"):
        seen = values(file_of(image, kind, transparency=index))
        assert seen[0, 0].tolist() == [255, 255, 255]
        assert seen[4, 6].tolist() == [0, 0, 255]


def test_sixteen_bits_keep_the_upper_eight() -> None:
    image = Image.fromarray(np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16))
    assert values(file_of(image))[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert values(file_of(image, transparency=0x8000))[0, :, 0].tolist() == [0, 0, 1, 255, 255]


def test_cmyk_and_grey_become_rgb() -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert values(file_of(cmyk, "JPEG", quality=95))[8, 8].tolist() == pytest.approx([255, 0, 0], abs=6)
    assert values(file_of(Image.new("L", (2, 2), 7)))[1, 1].tolist() == [7, 7, 7]
    assert values(file_of(Image.new("1", (2, 2), 1)))[1, 1].tolist() == [255, 255, 255]


def test_the_first_frame_of_a_moving_image() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    for kind in ("GIF", "WEBP", "PNG"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **LOSSLESS[kind])
        assert values(data)[2, 2].tolist() == [255, 0, 0]
        assert is_animated(decode_image(data, LIMITS))
        assert not is_animated(decode_image(file_of(frames[0], kind), LIMITS))


# ---- what is refused


def bomb() -> bytes:
    """A PNG of 40000 x 40000 black pixels in a few hundred bytes; its pixels are never decoded."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"\0") + chunk(b"IEND", b"")


def wide_frame() -> bytes:
    """A GIF of 1 x 1 whose first frame claims 65535 x 65535 pixels."""
    return b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;"


PICTURE = file_of(Image.effect_noise((64, 64), 90).convert("RGB"))
BAD = {
    "empty": (b"", "The image is empty."),
    "text": (b"hello", "no image in a supported format; send the image as PNG, JPEG, WebP or GIF"),
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG images are not"),
    "bmp": (file_of(flags(), "BMP"), "no image in a supported format"),
    "bomb": (bomb(), "40000 x 40000 pixels, and at most 50000000"),
    "wide frame": (wide_frame(), "pixels"),
    "cut header": (PICTURE[:20], "damaged or incomplete"),
    "cut pixels": (PICTURE[: len(PICTURE) // 2], "damaged or incomplete"),
    "cut jpeg": (file_of(flags(64, 64), "JPEG")[:400], "damaged or incomplete"),
    "cut webp": (file_of(flags(64, 64), "WEBP")[:60], "damaged or incomplete"),
    "only a signature": (b"RIFF\x04\0\0\0WEBP", "damaged or incomplete"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_in_one_sentence(name: str) -> None:
    data, why = BAD[name]
    with pytest.raises(ImageError, match=why) as raised:
        decode_image(data, LIMITS)
    text = str(raised.value)
    assert text.endswith(".")
    assert "\n" not in text


def test_too_many_bytes_or_pixels() -> None:
    with pytest.raises(ImageError, match="bytes, and at most 64 are accepted"):
        decode_image(PICTURE, ImageLimits(max_bytes=64))
    with pytest.raises(ImageError, match="64 x 64 pixels, and at most 4095 pixels"):
        decode_image(PICTURE, ImageLimits(max_pixels=4095))
    decode_image(PICTURE, ImageLimits(max_bytes=len(PICTURE), max_pixels=4096))


def test_size_is_checked_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugin in (PngImagePlugin.PngImageFile, GifImagePlugin.GifImageFile):
        monkeypatch.setattr(plugin, "load", lambda self: pytest.fail("decoded"))
    for kind in ("PNG", "GIF"):
        with pytest.raises(ImageError, match="at most 100 pixels"):
            decode_image(file_of(flags(20, 20), kind), ImageLimits(max_pixels=100))
        assert "at most 100 pixels" in pixels.run({"most": 100}, file_of(flags(20, 20), kind))[0]["refused"]


def many_scans(image: Image.Image, number: int) -> bytes:
    """A progressive JPEG whose last scan stands there so many times."""
    data = file_of(image, "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * number + data[-2:]


@catches(
    "the last scan that is allowed is refused", "mlxspec.images.pixels:MOST_SCANS", lambda right: right - 1
)
def test_a_jpeg_may_have_100_scans() -> None:
    for number, is_refused in ((100, False), (101, True)):
        data = many_scans(flags(16, 16), 2)
        data += b"\xff\xda" * (number - data.count(b"\xff\xda"))
        assert ("refused" in pixels.run({"most": 1 << 20}, data)[0]) == is_refused


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    """Each one is a walk over all pixels; the file is small."""
    assert values(many_scans(flags(64, 64), 50)).shape == (64, 64, 3)
    data = many_scans(flags(16, 16), 20_000)
    assert len(data) < 4 << 20
    with pytest.raises(ImageError, match=r"more than 100 scans\.$"):
        decode_image(data, LIMITS)


@catches(
    "images have no limit of time",
    "mlxspec.platform.helper:_Worker.run",
    lambda right: lambda self, program, *rest: right(self, replace(program, seconds=60.0), *rest),
)
def test_an_image_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    data = many_scans(Image.new("RGB", (4000, 4000)), 80)
    monkeypatch.setattr(source, "_SECONDS", 0.05)
    with pytest.raises(ImageError, match=r"takes more than 0\.05 seconds and was ended"):
        decode_image(data, LIMITS)
    assert values(PICTURE).shape == (64, 64, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="the system holds no limit of memory")
def test_an_image_that_takes_too_much_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_MEMORY", 16 << 20)
    with pytest.raises(ImageError, match=r"more than 16 MiB|damaged"):
        decode_image(file_of(Image.new("RGB", (3000, 3000))), LIMITS)
    assert values(PICTURE).shape == (64, 64, 3)


@pytest.mark.parametrize(
    "said",
    [{}, {"size": [64, 63]}, {"size": [-64, -64]}, {"size": [64.0, 64]}, {"size": [0, 0]}, {"size": 5}],
)
def test_what_a_helper_says_of_an_image_is_checked(said: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.platform.helper.run", lambda *_: (said, bytearray(3 * 64 * 64)))
    with pytest.raises(ImageError, match="damaged"):
        decode_image(PICTURE, LIMITS)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_pixels": -1}, {"max_pixels": True}])
def test_limits_check_themselves(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        ImageLimits(**options)


@pytest.mark.slow
def test_damaged_files_raise_nothing_else() -> None:
    """Bytes changed, cut and doubled at random: an image or an ImageError."""
    rng = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 5
    noise = Image.effect_noise((40, 30), 60).convert("RGB")
    files = [file_of(noise, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    files += [file_of(noise.quantize(64), "GIF"), file_of(noise.convert("CMYK"), "JPEG")]
    refused = 0
    for _ in range(3000):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            decoded = decode_image(bytes(data), LIMITS)
            assert decoded.mode == "RGB"
            assert is_animated(decoded) in (False, True)
        except ImageError:
            refused += 1
    assert 300 < refused < 2900
