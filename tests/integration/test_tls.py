"""Mutual TLS between gateway and engine: who gets in, and certificates that change while everything runs."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proa.engine.v1 import service_pb2, service_pb2_grpc
from proa.tls import TlsFiles, TlsSource
from proa_engine.server.serve import StartError
from proa_gateway.engines.channels import TlsChannels, insecure_channels
from support.certificates import Certificate, signed
from support.engine_client import DEADLINE, SessionClient
from support.engine_server import CLIENT_OPTIONS, LoadedFakeExecutor, RunningServer, running_server
from support.fake_engine import tokenizer_files
from support.mounted_secret import MountedSecret
from support.processes import free_port, gateway_process

NAME = "proa-engine"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Certificate]:
    """Two certificates by two authorities."""
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
    """Why GetModelInfo could not be called; nothing where it could."""
    # Fresh connections: the process would share one that was let in before.
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


async def test_only_a_client_by_the_same_authority_gets_in(
    secret: MountedSecret, made: tuple[Certificate, Certificate]
) -> None:
    ours, theirs = made
    with serving(secret) as server:
        assert await refusal(server, channels(files_of(ours))) == ""
        assert await refusal(server, channels(files_of(theirs, authority=ours)))
        assert await refusal(server, channels(files_of(ours, anonymous=True)))
        assert await refusal(server, insecure_channels)


async def test_a_client_refuses_an_engine_by_another_authority_or_name(
    secret: MountedSecret, made: tuple[Certificate, Certificate]
) -> None:
    ours, theirs = made
    with serving(secret) as server:
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(server, channels(files_of(ours, authority=theirs)))
        assert "Hostname Verification Check failed" in await refusal(server, channels(files_of(ours), "somebody-else"))


async def test_without_an_authority_any_client_that_trusts_the_engine_gets_in(
    made: tuple[Certificate, Certificate],
) -> None:
    files = TlsFiles(certificate=made[0].certificate, key=made[0].key)
    with running_server(tls=files, health_port=free_port()) as server:
        assert await refusal(server, channels(files_of(made[0], anonymous=True))) == ""


async def test_both_sides_take_new_certificates_for_new_connections_and_streams_run_on(
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


async def test_an_engine_whose_new_files_are_bad_keeps_the_old_and_says_so(
    secret: MountedSecret, made: tuple[Certificate, Certificate], caplog: pytest.LogCaptureFixture
) -> None:
    open_channel = channels(files_of(made[0]))
    with serving(secret) as server, caplog.at_level(logging.ERROR):
        secret.put_garbage()
        assert await refusal(server, open_channel) == ""
        assert await refusal(server, open_channel) == ""
        assert [record.message for record in caplog.records if "certificates stay" in record.message]
        secret.put(made[1])
        assert await refusal(server, channels(files_of(made[1]))) == ""


async def test_the_health_port_answers_probes_in_plaintext_and_nothing_else(secret: MountedSecret) -> None:
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


def test_files_that_cannot_be_used_are_told_in_a_sentence_at_the_start(secret: MountedSecret) -> None:
    secret.put_garbage()
    with pytest.raises(StartError, match="are not a certificate and its key in PEM"), running_server(tls=secret.files):
        pass


def test_a_gateway_serves_over_tls_and_reconnects_with_what_its_files_hold_then(
    secret: MountedSecret, made: tuple[Certificate, Certificate], tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    port = free_port()

    def engine() -> Any:
        executor = LoadedFakeExecutor(num_blocks=512, max_model_len=1024, model_config=SimpleNamespace(vocab_size=1000))
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
