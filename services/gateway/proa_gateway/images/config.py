"""ImageOptions: the flags about images, and the hosts that images may be fetched from."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Self

from yarl import URL

from proa.image.limits import ImageError, ImageLimits
from proa.options import check_options, option, parse_count

MAX_URL = 8192  # characters
_PORTS = (80, 443)
# Pillow itself refuses larger ones, by a setting of the whole process.
_MOST_PIXELS = 89_478_485


@dataclass(frozen=True, slots=True)
class AllowedDomain:
    host: str  # lower case; exact: its subdomains are others
    port: int | None = None  # None: 80 and 443

    @classmethod
    def parse(cls, text: str) -> Self:
        """HOST or HOST:PORT; IPv6 addresses in brackets if a port follows. Raises `ValueError`."""
        bare = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
        try:
            url = URL(f"http://{bare}/")
            is_origin = str(url.origin()) + "/" == str(url)
        except ValueError:
            is_origin = False
        if not is_origin or not url.raw_host or "*" in text:
            raise ValueError(f"{text!r} is not HOST or HOST:PORT")
        return cls(url.raw_host.lower(), url.explicit_port)

    def allows(self, url: URL) -> bool:
        if url.raw_host is None or url.raw_host.lower() != self.host:
            return False
        return url.port in _PORTS if self.port is None else url.port == self.port


def check_url(text: str, domains: Collection[AllowedDomain], name: str = "image") -> URL:
    """`name`: of what the URL is, for errors. Raises `ImageError`.

    A host that is an address is allowed if it was named, also in a private network."""
    if len(text) > MAX_URL:
        raise ImageError(f"the URL has {len(text)} characters, the limit is {MAX_URL}")
    try:
        url = URL(text)
    except ValueError:
        raise ImageError("the URL cannot be read") from None
    if url.scheme not in ("http", "https") or url.raw_host is None:
        raise ImageError("the URL is not a data URL, nor one of http or https")
    if url.raw_user is not None or url.raw_password is not None:
        raise ImageError("the URL has a user name or a password, which is not supported")
    if not any(domain.allows(url) for domain in domains):
        raise ImageError(
            f"{name}s are not fetched from the URL's host and port, the server allows others or none: "
            f"send the {name} as a data URL"
        )
    return url


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """vLLM's form: JSON with a number for each kind of input."""

    image: int = 16  # images in one prompt
    audio: int = 4  # audios in one prompt

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError`."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or set(values) - {"image", "audio"}:
            raise ValueError(f'{text!r} is not JSON such as {{"image": 16, "audio": 4}}, the only such inputs')
        for name, number in values.items():
            if type(number) is not int or number < 0:
                raise ValueError(f"{text!r} must have a number of {name}s that is not negative")
        return cls(**values)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Raises `ValueError` for a value out of range."""

    limit_mm_per_prompt: PromptLimit = option(
        PromptLimit(),
        "limit of images and of audios in a prompt, as JSON; beyond it 400",
        metavar="JSON",
        parse=PromptLimit.from_json,
    )
    allowed_media_domains: tuple[AllowedDomain, ...] = option(
        (),
        "host from which images and audio files of http and https URLs are fetched, on the ports 80 and 443 unless it "
        "names one; an address of a private network must be named itself; repeat for several (default: no URL is "
        "fetched)",
        metavar="HOST[:PORT]",
        parse=AllowedDomain.parse,
    )
    image_fetch_timeout: float = option(
        5.0, "time in seconds to fetch an image or an audio file, redirects included; beyond it 400", minimum=0.001
    )
    max_image_bytes: int = option(
        20 * 1024 * 1024, "limit of an image's file in bytes; beyond it 400", parse=parse_count, minimum=1
    )
    max_image_pixels: int = option(
        50_000_000,
        "limit of an image's pixels before resizing, such as 50m; beyond it 400",
        parse=parse_count,
        minimum=1,
        maximum=_MOST_PIXELS,
    )
    image_threads: int = option(2, "threads that decode and resize images", minimum=1)
    image_cache_bytes: int = option(
        128 * 1024 * 1024,
        "limit of the resized images that are kept for the next request with them, in bytes; the same for the samples "
        "of audios in prompts",
        parse=parse_count,
        minimum=0,
    )
    max_image_memory: int = option(
        512 * 1024 * 1024,
        "limit of the resized images of unfinished requests in bytes; beyond it 429",
        parse=parse_count,
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(max_bytes=self.max_image_bytes, max_pixels=self.max_image_pixels)
