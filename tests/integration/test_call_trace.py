"""How much of the code a request enters: what someone reads who follows one."""

import proa_gateway
from support.call_trace import traced_calls
from support.fake_engine import FakeEngine
from support.gateway import chat_body, running_gateway


async def test_a_plain_chat_enters_few_files_and_functions_of_the_gateway() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as running:
        body = chat_body(stream=True)
        await running.events("/v1/chat/completions", body)  # compiles the chat template, imports what is imported late
        with traced_calls(proa_gateway) as trace:
            await running.events("/v1/chat/completions", body)
    assert len(trace.functions) <= 320, f"\n{trace}"
    assert len(trace.files) <= 53, f"\n{trace}"
