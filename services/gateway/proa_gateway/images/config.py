"""ImageOptions: which images requests may have."""

import json
from dataclasses import dataclass
from typing import Self

from proa.image.limits import ImageLimits
from proa.options import check_options, option
from proa_gateway.images.domains import AllowedDomain

# Pillow itself refuses larger ones, by a setting of the whole process.
_MOST_PIXELS = 89_478_485


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """vLLM's form: JSON with a number for each kind of input."""

    image: int = 16

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError`."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or set(values) - {"image"}:
            raise ValueError(f'{text!r} is not JSON such as {{"image": 16}}; images are the only such input')
        image = values.get("image", cls().image)
        if type(image) is not int or image < 0:
            raise ValueError(f"{text!r} must have a number of images that is not negative")
        return cls(image)

    def __str__(self) -> str:
        return json.dumps({"image": self.image})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Raises `ValueError` for a value out of range."""

    limit_mm_per_prompt: PromptLimit = option(
        PromptLimit(),
        "limit of images in a prompt, as JSON; beyond it 400",
        metavar="JSON",
        parse=PromptLimit.from_json,
    )
    allowed_media_domains: tuple[AllowedDomain, ...] = option(
        (),
        "host from which images of http and https URLs are fetched, on the ports 80 and 443 unless it names one; an "
        "address of a private network must be named itself; repeat for several (default: no URL is fetched)",
        metavar="HOST[:PORT]",
        parse=AllowedDomain.parse,
    )
    image_fetch_timeout: float = option(
        5.0, "time in seconds to fetch an image, redirects included; beyond it 400", minimum=0.001
    )
    max_image_bytes: int = option(20 * 1024 * 1024, "limit of an image's file in bytes; beyond it 400", minimum=1)
    max_image_pixels: int = option(
        50_000_000, "limit of an image's pixels before resizing; beyond it 400", minimum=1, maximum=_MOST_PIXELS
    )
    image_threads: int = option(2, "threads that decode and resize images", minimum=1)
    image_cache_bytes: int = option(
        128 * 1024 * 1024, "limit of the resized images that are kept for the next request with them", minimum=0
    )
    max_image_memory: int = option(
        512 * 1024 * 1024, "limit of the resized images of unfinished requests in bytes; beyond it 429", minimum=0
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(max_bytes=self.max_image_bytes, max_pixels=self.max_image_pixels)
