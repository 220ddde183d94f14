"""One release of the chart for each file of tests, in a namespace of its own, from images that the cluster can pull.

PROA_IMAGE_REGISTRY and PROA_IMAGE_TAG name the images (default localhost:5000 and dev).
"""

import os
import secrets
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from support.kube import Release, run


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> Iterator[Release]:
    registry = os.environ.get("PROA_IMAGE_REGISTRY", "localhost:5000")
    tag = os.environ.get("PROA_IMAGE_TAG", "dev")
    release = Release("proa", f"proa-e2e-{secrets.token_hex(3)}", registry, tag)
    try:
        release.make_namespace()
        release.install()
        yield release
    finally:
        if request.session.testsfailed or sys.exc_info()[0] is not None:
            with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                print("\n" + release.describe())
        run("kubectl", "delete", "namespace", release.namespace, "--ignore-not-found", "--wait=false", check=False)


@pytest.fixture
def client(release: Release) -> Iterator[OpenAI]:
    with release.client() as client:
        yield client
