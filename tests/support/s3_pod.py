"""The S3 server of `support.s3` in the cluster: the program on this machine, copied into a pod with a Service."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.kube import Release, eventually
from support.s3 import KEY, PROGRAM, SECRET, S3Server
from support.script_pod import script_pod

NAME, PORT = "store", 7070
_COPY = """
import os, shutil, sys
with open("/data/copy", "wb") as copy:
    shutil.copyfileobj(sys.stdin.buffer, copy)
os.chmod("/data/copy", 0o755)
os.rename("/data/copy", "/data/versitygw")
"""
_PROBE = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 1)"


@contextmanager
def s3_pod(release: Release, bucket: str) -> Iterator[S3Server]:
    """Run the server in the release's namespace. The one that is yielded is reached on this machine.

    Skips the tests if `scripts/with-tool` has not compiled the program.
    """
    if not PROGRAM.exists():
        pytest.skip("not run: scripts/with-tool has not compiled versitygw")
    script, folders = Path(__file__).with_name("become.py"), f"/data/metadata,/data/objects/{bucket}"
    command = ["/data/versitygw", folders, f"--access={KEY}", f"--secret={SECRET}", f"--port=:{PORT}", "--quiet"]
    command += ["posix", "--sidecar=/data/metadata", "/data/objects"]
    spec = {"selector": {"app": NAME}, "ports": [{"port": PORT}]}
    release.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": spec})
    volumes: dict[str, Any] = {"data": {"emptyDir": {}}}
    with script_pod(release, NAME, script, *command, labels={"app": NAME}, volumes=volumes):
        inside = ("kubectl", "--namespace", release.namespace, "exec", "--stdin", NAME, "--", "python3", "-c")
        with PROGRAM.open("rb") as program:
            subprocess.run([*inside, _COPY], stdin=program, check=True, timeout=300)

        def listens() -> bool:
            return subprocess.run([*inside, _PROBE], capture_output=True, check=False, timeout=60).returncode == 0

        eventually("the S3 server listens", listens)
        with release.forwarded(NAME, PORT) as port:
            yield S3Server(port)


def bucket_keys(name: str, secret_key: str = SECRET) -> dict[str, Any]:
    """A Secret with the variables of a client in the namespace."""
    variables = {
        "AWS_ENDPOINT_URL": f"http://{NAME}:{PORT}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": secret_key,
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": variables}
