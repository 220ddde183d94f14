"""How much of the code a request enters: what someone reads who follows one."""

from dataclasses import replace

import proa_engine
import proa_gateway
from proa.contract import SamplingParams
from proa_engine.builtin import builtin_model_folder
from support.call_trace import traced_calls
from support.engine import build_core, request
from support.fake_engine import FakeEngine
from support.gateway import chat_body, running_gateway


async def test_a_plain_chat_enters_few_files_and_functions_of_the_gateway() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as running:
        body = chat_body(stream=True)
        await running.events("/v1/chat/completions", body)  # compiles the chat template, imports what is imported late
        with traced_calls(proa_gateway) as trace:
            await running.events("/v1/chat/completions", body)
    assert len(trace.functions) <= 250, f"\n{trace}"
    assert len(trace.files) <= 46, f"\n{trace}"


def test_steps_of_decodes_enter_few_files_and_functions_of_the_engine() -> None:
    params = SamplingParams(max_tokens=60, temperature=0.6, ignore_eos=True)
    with (
        traced_calls(proa_engine, "core", "executor", "worker", "step", "ranks", "memory") as trace,
        build_core(builtin_model_folder()) as engine,
    ):
        for name in ("a", "b"):
            engine.core.submit(request(name, range(5, 45), params))
        for _ in range(5):
            engine.core.step()
        trace.functions.clear()
        for _ in range(20):  # some of which fill blocks
            engine.core.step()
        steps = replace(trace, functions=set(trace.functions))
    assert len(steps.functions) <= 96, f"\n{steps}"
    assert len(steps.files) <= 30, f"\n{steps}"
