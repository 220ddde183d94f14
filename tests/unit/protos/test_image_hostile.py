"""Files that are damaged, lie, or are no images: an `ImageError`, and never another one."""

import random
from contextlib import suppress

import pytest

from proa.image.limits import ImageError, ImageLimits
from proa.image.prepare import num_pixels, prepare_image
from support.hostile_images import ACCEPTED, REFUSED
from support.image_files import KEEPS_SHAPE, encoded, random_image
from support.thorough import seeds

EXIF = b"Exif\0\0II*\0\x08\0\0\0\0\0"
TWO_FRAMES = {"save_all": True, "append_images": [random_image("RGB", 40, 30, 1)]}
FILES = {
    "PNG": encoded(random_image("P", 40, 30), "PNG", transparency=bytes(range(100)), exif=EXIF),
    "PNG of two frames": encoded(random_image("RGB", 40, 30), "PNG", **TWO_FRAMES),
    "JPEG": encoded(random_image("RGB", 40, 30), "JPEG", comment="a comment", dpi=(72, 72), exif=EXIF),
    "progressive JPEG": encoded(random_image("CMYK", 40, 30), "JPEG", progressive=True),
    "WebP": encoded(random_image("RGBA", 40, 30), "WEBP", exif=EXIF),
    "WebP of two frames": encoded(random_image("RGB", 40, 30), "WEBP", **TWO_FRAMES),
    "GIF": encoded(random_image("RGB", 40, 30), "GIF", **TWO_FRAMES),
    "BMP": encoded(random_image("P", 40, 30), "BMP"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(ImageError, match=r"^the image.* [^.]*[^.]$"):
        prepare_image(REFUSED[name](), KEEPS_SHAPE, ImageLimits())


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_a_file_has_besides_its_pixels_is_not_read(name: str) -> None:
    assert prepare_image(ACCEPTED[name](), KEEPS_SHAPE, ImageLimits()).num_tokens == 4


def damaged(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 8])):
        at = generator.randrange(len(changed))
        match generator.randrange(5):
            case 0:
                changed[at] = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)])
            case 1:
                changed[at] ^= 1 << generator.randrange(8)
            case 2:
                del changed[at : at + generator.choice([1, 4, 100])]
            case 3:
                changed[at:at] = changed[at : at + generator.choice([1, 4, 100])]
            case 4:
                del changed[at:]
        changed += b"" if changed else b"\0"
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")  # Pillow warns of damaged files
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused(name: str) -> None:
    # Damage makes some of them claim more pixels, which are not to be waited for here.
    limits = ImageLimits(max_pixels=100_000)
    for seed in seeds(150, 5000):
        data = damaged(FILES[name], random.Random(f"{name} {seed}"))
        with suppress(ImageError):
            assert num_pixels(data, limits) <= 100_000
            prepare_image(data, KEEPS_SHAPE, limits)
