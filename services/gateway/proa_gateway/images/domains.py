"""The hosts from which images may be fetched. Knows URLs, and opens no connection."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from yarl import URL

from proa.image.error import ImageError

MAX_URL = 8192  # characters
_PORTS = (80, 443)


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


def check_url(text: str, domains: Collection[AllowedDomain]) -> URL:
    """Raises `ImageError`. A host that is an address is allowed if it was named, also in a private network."""
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
            "images are not fetched from the URL's host and port, the server allows others or none: "
            "send the image as a data URL"
        )
    return url
