"""Mutual TLS between gateway and engine, and certificates that change while both run."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proa.engine.v1 import service_pb2, service_pb2_grpc
from proa.tls import TlsFiles, TlsSource
from proa_engine.server.serve import StartError
from proa_gateway.engines.discovery import TlsChannels, insecure_channels
from support.certificates import Certificate, signed
from support.engine_client import DEADLINE, SessionClient
from support.engine_server import CLIENT_OPTIONS, LoadedFakeExecutor, RunningServer, running_server
from support.fake_engine import tokenizer_files
from support.fake_executor import FakeModelConfig
from support.mounted_secret import MountedSecret
from support.processes import free_port, gateway_process

NAME = "proa-engine"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Certificate]:
    """Two certificates, each of an authority of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    return signed(folder / "first"), signed(folder / "second")


@pytest.fixture
def secret(made: tuple[Certificate, Certificate], tmp_path: Path) -> MountedSecret:
    return MountedSecret(tmp_path / "engine", made[0])


@contextmanager
def serving(
    secret: MountedSecret, executor: LoadedFakeExecutor | None = None, **choices: Any
) -> Iterator[RunningServer]:
    with running_server(executor, tls=secret.files, health_port=free_port(), **choices) as server:
        yield server


def files_of(certificate: Certificate, *, authority: Certificate | None = None, anonymous: bool = False) -> TlsFiles:
    signer = (authority or certificate).authority
    if anonymous:
        return TlsFiles(authority=signer)
    return TlsFiles(certificate=certificate.certificate, key=certificate.key, authority=signer)


async def refusal(server: RunningServer, open_channel: Any) -> str:
    """The error of a GetModelInfo call; empty if it succeeds."""
    # A new connection: gRPC would share an accepted one within the process.
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with open_channel(f"127.0.0.1:{server.port}", options) as channel:
        try:
            request = service_pb2.GetModelInfoRequest()
            await service_pb2_grpc.EngineServiceStub(channel).GetModelInfo(request, timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            return f"{error.code()}: {error.details()}"
    return ""


def channels(files: TlsFiles, name: str = NAME) -> TlsChannels:
    return TlsChannels(TlsSource(files), name)


async def test_only_clients_of_the_same_authority_are_accepted(
    secret: MountedSecret, made: tuple[Certificate, Certificate]
) -> None:
    ours, theirs = made
    with serving(secret) as server:
        assert await refusal(server, channels(files_of(ours))) == ""
        assert await refusal(server, channels(files_of(theirs, authority=ours)))
        assert await refusal(server, channels(files_of(ours, anonymous=True)))
        assert await refusal(server, insecure_channels)


async def test_client_rejects_an_engine_of_another_authority_or_name(
    secret: MountedSecret, made: tuple[Certificate, Certificate]
) -> None:
    ours, theirs = made
    with serving(secret) as server:
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(server, channels(files_of(ours, authority=theirs)))
        assert "Hostname Verification Check failed" in await refusal(server, channels(files_of(ours), "somebody-else"))


async def test_engine_without_an_authority_accepts_any_client_that_trusts_it(
    made: tuple[Certificate, Certificate],
) -> None:
    files = TlsFiles(certificate=made[0].certificate, key=made[0].key)
    with running_server(tls=files, health_port=free_port()) as server:
        assert await refusal(server, channels(files_of(made[0], anonymous=True))) == ""


async def test_new_certificates_are_used_for_new_connections_and_running_streams_continue(
    secret: MountedSecret, made: tuple[Certificate, Certificate], tmp_path: Path
) -> None:
    before, after = made
    of_gateway = MountedSecret(tmp_path / "gateway", before)
    open_channel = channels(of_gateway.files)
    executor = LoadedFakeExecutor(while_waiting=lambda: time.sleep(0.005))
    with serving(secret, executor) as server:
        async with open_channel(f"127.0.0.1:{server.port}", CLIENT_OPTIONS) as channel:
            session = await SessionClient(server.stub(channel)).open()
            await session.add(1, [1, 2], max_tokens=100)
            assert await session.read()
            secret.put(after)
            assert await refusal(server, open_channel), "the gateway does not know the engine's new authority yet"
            of_gateway.put(after)
            assert await refusal(server, open_channel) == ""
            assert await refusal(server, channels(files_of(before)))
            assert 1 not in session.finished
            await session.read_until_finished(1)
            assert len(session.tokens[1]) == 100


async def test_invalid_new_certificate_is_logged_and_the_current_one_kept(
    secret: MountedSecret, made: tuple[Certificate, Certificate], caplog: pytest.LogCaptureFixture
) -> None:
    open_channel = channels(files_of(made[0]))
    with serving(secret) as server, caplog.at_level(logging.ERROR):
        secret.put_garbage()
        assert await refusal(server, open_channel) == ""
        assert await refusal(server, open_channel) == ""
        assert [record.message for record in caplog.records if "TLS certificates not reloaded" in record.message]
        secret.put(made[1])
        assert await refusal(server, channels(files_of(made[1]))) == ""


async def test_health_port_serves_only_health_in_plaintext(secret: MountedSecret) -> None:
    port = free_port()
    with running_server(tls=secret.files, health_port=port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="startup"), timeout=DEADLINE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = service_pb2_grpc.EngineServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_unusable_certificate_files_are_an_error_at_start(secret: MountedSecret) -> None:
    secret.put_garbage()
    with pytest.raises(StartError, match="are not a certificate and its key in PEM"), running_server(tls=secret.files):
        pass


def test_gateway_serves_over_tls_and_reconnects_with_its_current_certificate(
    secret: MountedSecret, made: tuple[Certificate, Certificate], tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    port = free_port()

    def engine() -> Any:
        model_config = FakeModelConfig(1000)
        executor = LoadedFakeExecutor(num_blocks=512, max_model_len=1024, model_config=model_config)
        return serving(secret, executor, port=port, tokenizer_folder=folder)

    with engine() as server, gateway_process(f"127.0.0.1:{server.port}", *secret.flags) as (_, gateway_port):
        assert chat(gateway_port)
        server.server.request_stop()
        server.thread.join(DEADLINE)
        secret.put(made[1])
        with engine():
            deadline = time.monotonic() + DEADLINE
            while not chat(gateway_port):
                assert time.monotonic() < deadline


def chat(port: int) -> bool:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=DEADLINE)
    return answer.status_code == 200
