"""One release of the chart for each test file, in its own namespace.

PROA_IMAGE_REGISTRY and PROA_IMAGE_TAG select the images (default localhost:5000 and dev).
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator

import pytest
from openai import OpenAI

from support.kube import Release, run


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print at once, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print("\n" + text, end="", flush=True)

    return write


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest, report: Callable[[str], None]) -> Iterator[Release]:
    registry = os.environ.get("PROA_IMAGE_REGISTRY", "localhost:5000")
    tag = os.environ.get("PROA_IMAGE_TAG", "dev")
    release = Release("proa", f"proa-e2e-{secrets.token_hex(3)}", registry, tag, report)
    try:
        release.make_namespace()
        release.install()
        yield release
    finally:
        if request.session.testsfailed or sys.exc_info()[0] is not None:
            report(release.describe())
        run("kubectl", "delete", "namespace", release.namespace, "--ignore-not-found", "--wait=false", check=False)


@pytest.fixture
def client(release: Release) -> Iterator[OpenAI]:
    with release.client() as client:
        yield client
