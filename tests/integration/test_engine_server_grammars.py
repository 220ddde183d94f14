"""Grammars over gRPC, with the built-in model: what an engine tells, constrains, refuses and counts."""

import json
import threading
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from prometheus_client import generate_latest

from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.server.options import ServeOptions
from proa_engine.server.serve import EngineServer
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.tokenizer import Tokenizer
from support.engine_client import DEADLINE
from support.engine_server import wait_for_health
from support.scrape import Scrape

Stub = service_pb2_grpc.EngineServiceStub
OBJECT = 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], \
"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'
TOKENIZER = Tokenizer(read_tokenizer_files(builtin_model_folder()))


class Engine:
    def __init__(self) -> None:
        config = EngineConfig(model="builtin", dtype="float32", max_model_len=256, num_gpu_blocks_override=64)
        options = ServeOptions(config=config, host="127.0.0.1", port=0, metrics_port=0, health_port=0)
        self.server = EngineServer(options, exit_process=lambda status: None)
        self.port = self.server.start()
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def scrape(self) -> Scrape:
        return Scrape(generate_latest(self.server._registry).decode())


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    before = {thread.name for thread in threading.enumerate()}
    engine = Engine()
    wait_for_health(engine.port, "startup")
    yield engine
    engine.server.request_stop()
    engine.thread.join(DEADLINE)
    assert not engine.thread.is_alive()
    assert "proa-grammar" not in {thread.name for thread in threading.enumerate()} - before


@pytest.fixture
async def stub(engine: Engine) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{engine.port}") as channel:
        yield Stub(channel)


async def generate(
    stub: Stub, grammar: core_pb2.Grammar, resumed: list[int] | None = None
) -> tuple[list[int], core_pb2.EngineCoreOutput]:
    """The tokens and the last output."""
    request = core_pb2.EngineCoreRequest(
        prompt_token_ids=b"\x05\0\0\0",
        sampling_params=core_pb2.SamplingParams(max_tokens=100, key=7, grammar=grammar),
        resumed_token_ids=b"".join(each.to_bytes(4, "little") for each in resumed or []),
    )
    tokens: list[int] = []
    async for response in stub.Generate(service_pb2.GenerateRequest(request=request), timeout=DEADLINE):
        tokens += response.output.new_token_ids
    return tokens, response.output


async def test_model_info_has_grammars_and_the_model_type(stub: Stub) -> None:
    info = await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)

    assert info.grammars
    assert info.model_type == "llama"


async def test_output_matches_its_grammar(stub: Stub) -> None:
    tokens, last = await generate(stub, core_pb2.Grammar(text=OBJECT))

    assert list(json.loads(TOKENIZER.decode(tokens))) == ["a"]
    assert last.finish_reason == core_pb2.FINISH_REASON_COMPLETE


async def test_output_resumed_at_any_token_is_the_same(stub: Stub) -> None:
    tokens, _ = await generate(stub, core_pb2.Grammar(text=OBJECT))

    for count in range(1, len(tokens) + 1):
        rest, last = await generate(stub, core_pb2.Grammar(text=OBJECT), tokens[:count])
        assert tokens[:count] + rest == tokens
        assert last.finish_reason == core_pb2.FINISH_REASON_COMPLETE
        assert last.num_output_tokens == len(tokens)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (core_pb2.Grammar(text="start: missing"), 'unknown name: "missing"'),
        (core_pb2.Grammar(text="start: " + "(" * 9000), "at most 8000 rules, parentheses and repetitions"),
        (core_pb2.Grammar(text="start: A\nA: " + '"a"|' * 20_001 + '"b"'), "at most 20000 alternatives"),
        (core_pb2.Grammar(text='start: "a"', start_after=[5000]), "token id 5000 in start_after"),
    ],
)
async def test_bad_grammar_is_an_invalid_argument(stub: Stub, grammar: core_pb2.Grammar, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, grammar)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


async def test_metrics_count_grammars(engine: Engine, stub: Stub) -> None:
    before = engine.scrape()
    text = 'start: "never seen before"'
    for _ in range(2):
        await generate(stub, core_pb2.Grammar(text=text))
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(stub, core_pb2.Grammar(text="start: unknown"))
    after = engine.scrape()

    def more(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert more("proa_engine_grammar_compile_duration_seconds_count") == 2
    assert more("proa_engine_grammar_cache_queries_total") == 3
    assert more("proa_engine_grammar_cache_hits_total") == 1
    assert more("proa_engine_grammar_refusals_total", reason="invalid") == 1
    assert more("proa_engine_grammar_fill_duration_seconds_count") == 2  # all tokens but the first are forced
    assert more("proa_engine_grammar_forced_tokens_total") > 2
