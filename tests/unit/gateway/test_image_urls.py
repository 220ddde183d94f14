"""Which URLs of images are read or fetched, and their bytes."""

from base64 import b64encode, urlsafe_b64encode

import pytest

from proa.image.limits import ImageError
from proa_gateway.images.config import AllowedDomain, check_url
from proa_gateway.images.fetch import is_public, read_data_url

DATA = bytes(range(256)) + b"\xfb\xff\xfe"
TEXT = b64encode(DATA).decode()
URL_SAFE = urlsafe_b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:base64,{TEXT}",
        f"DATA:image/jpeg;charset=utf-8;BASE64,{TEXT}",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64, {TEXT[:76]}\r\n{TEXT[76:]}\n",
        f"data:image/png;base64,{TEXT.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
    ],
)
def test_data_urls_are_read_as_clients_send_them(url: str) -> None:
    assert read_data_url(url, 1000) == DATA


@pytest.mark.parametrize("url", ["data:", "data:image/png", "data:image/png,text", "data:image/svg+xml;utf8,<svg/>"])
def test_data_urls_without_base64_are_refused(url: str) -> None:
    with pytest.raises(ImageError, match="not of the form"):
        read_data_url(url, 1000)


@pytest.mark.parametrize("text", ["a", "ab=c", "äöü=", "<svg/>", "QUJD*QUJD"])
def test_damaged_base64_is_refused(text: str) -> None:
    with pytest.raises(ImageError, match="damaged"):
        read_data_url(f"data:;base64,{text}", 1000)


def test_a_long_data_url_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ImageError, match="about 2998 bytes, the limit is 2000"):
        read_data_url("data:;base64," + "*" * 4000, 2000)


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("Example.com", AllowedDomain("example.com")),
        ("example.com:8443", AllowedDomain("example.com", 8443)),
        ("10.0.0.5", AllowedDomain("10.0.0.5")),
        ("10.0.0.5:9000", AllowedDomain("10.0.0.5", 9000)),
        ("::1", AllowedDomain("::1")),
        ("[::1]:9000", AllowedDomain("::1", 9000)),
        ("bücher.example", AllowedDomain("xn--bcher-kva.example")),
    ],
)
def test_a_domain_is_a_host_and_maybe_a_port(text: str, domain: AllowedDomain) -> None:
    assert AllowedDomain.parse(text) == domain


@pytest.mark.parametrize(
    "text", ["", "*.example.com", "https://example.com", "example.com/path", "user@example.com", "a:b", "a#b", "a?b"]
)
def test_what_is_no_domain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST or HOST:PORT"):
        AllowedDomain.parse(text)


DOMAINS = [AllowedDomain("example.com"), AllowedDomain("files.example.com", 8443), AllowedDomain("10.0.0.5")]


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png?size=2",
        "http://EXAMPLE.com:80/",
        "http://example.com:443/",
        "https://files.example.com:8443/a",
        "http://10.0.0.5/a",
    ],
)
def test_urls_of_allowed_domains_are_fetched(url: str) -> None:
    assert check_url(url, DOMAINS).host == url.split("/")[2].split(":")[0].lower()


@pytest.mark.parametrize(
    "url",
    [
        "https://www.example.com/",
        "https://example.com.evil.net/",
        "https://example.com./",
        "https://example.com:8443/",
        "https://files.example.com/",
        "https://example.com@evil.net/",
        "https://user:password@example.com/",
        "https://evil.net\\@example.com/",
        "https://evil.net#@example.com/",
        "http://167772165/",
        "http://012.0.0.5/",
        "http://0x0a.0.0.5/",
        "http://[::ffff:10.0.0.5]/",
        "http://127.0.0.1/",
        "file:///etc/passwd",
        "file://example.com/etc/passwd",
        "ftp://example.com/",
        "//example.com/",
        "example.com",
        "http://",
        "http://[",
        "http://example.com:99999/",
        "",
        "https://example.com/" + "a" * 9000,
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ImageError):
        check_url(url, DOMAINS)


def test_without_domains_no_url_is_fetched() -> None:
    with pytest.raises(ImageError, match="send the image as a data URL"):
        check_url("https://example.com/", [])


NOT_PUBLIC = """
    0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 169.254.169.254 172.16.0.1 192.0.0.8 192.168.0.1 192.88.99.1 198.18.0.1
    203.0.113.5 224.0.0.1 240.0.0.1 255.255.255.255
    :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b:1::1 100::1 2001::1 2001:db8::1
    2002:7f00:1:: 3fff::1 5f00::1 fc00::1 fe80::1 fe80::1%eth0 fec0::1 ff02::1
"""


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *((address, False) for address in NOT_PUBLIC.split()),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected
