"""From the bytes of an image to the pixels that an engine reads."""

from collections.abc import Iterator
from contextlib import contextmanager

import PIL.Image
from PIL import ImageOps

from proa.contract import Image, ImageInput
from proa.image.decode import check_size, open_image, to_rgb
from proa.image.limits import ImageError, ImageLimits, hash_image, resized


def prepare_image(data: bytes, input: ImageInput, limits: ImageLimits) -> Image:
    """`data` is a file. The first frame of an animated image is taken, turned as its EXIF orientation says, and put on
    white where it is transparent. Raises `ImageError`. To be run in a thread: Pillow releases the GIL."""
    with _as_image_error():
        return _prepare(_decode(data, input, limits), input)


def num_pixels(data: bytes, limits: ImageLimits) -> int:
    """Return the number of pixels of an image before it is resized. Decodes only its header. Raises `ImageError`."""
    with _as_image_error():
        image, _ = open_image(data, limits)
        check_size(image, limits)
        return image.width * image.height


def prepare_pillow(image: object, input: ImageInput) -> Image:
    """Prepare a `PIL.Image.Image` that the caller has opened or made, as `prepare_image` does, but without limits."""
    if not isinstance(image, PIL.Image.Image):
        raise ImageError(f"an image must be a PIL.Image.Image, got {type(image).__name__}")
    return _prepare(to_rgb(ImageOps.exif_transpose(image)), input)


@contextmanager
def _as_image_error() -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # Pillow raises errors of any kind for damaged files
        reason = str(error) or type(error).__name__
        raise ImageError(f"the image cannot be read, its file may be damaged: {reason}") from error


def _decode(data: bytes, input: ImageInput, limits: ImageLimits) -> PIL.Image.Image:
    """The upright image in mode RGB."""
    image, orientation = open_image(data, limits)
    check_size(image, limits)
    resized(*orientation.turned(image.height, image.width), input)  # raises before pixels are decoded
    return orientation.apply(to_rgb(image))


def _prepare(image: PIL.Image.Image, input: ImageInput) -> Image:
    """`image` is upright, in mode RGB."""
    height, width = resized(image.height, image.width, input)
    pixels = image.resize((width, height), PIL.Image.Resampling(input.resample)).tobytes()
    return Image(
        hash=hash_image(pixels, height, width),
        height=height,
        width=width,
        num_tokens=input.num_tokens(height, width),
        pixels=pixels,
    )
