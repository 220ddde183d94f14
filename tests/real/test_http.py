"""A real model behind a gateway: streams, schemas, forced calls of tools, log probabilities, decisions."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import pytest
import torch
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from support import real_model, real_texts
from support.processes import engine_process, gateway_process
from support.real_facts import facts
from support.real_model import Record
from support.real_schemas import SCHEMAS, fields, listed, text, whole

MODEL = "smollm2"
SECONDS = 600.0  # far more than all answers take, on a busy machine
ENGINE = (
    f"--model={real_model.FOLDER}",
    f"--served-model-name={MODEL}",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=512",
    "--num-gpu-blocks-override=800",
)
TOOLS: dict[str, Any] = {
    "get_weather": fields(city=text(), unit={"enum": ["celsius", "fahrenheit"]}),
    "add": fields(a=whole(), b=whole()),
    "send_email": fields(to=listed(text()), subject=text(40)),
}
QUESTIONS_FOR_TOOLS = ("What is the weather in Lisbon?", "What is 123 plus 508?", "Write to Bob that I am late.")
# The model's own template has no tools: without this one, they would be described in the first message.
TOOLS_BEFORE = (
    "{% if tools %}<|im_start|>system\nYou may call these functions: {{ tools | tojson }}. Write a call as "
    '<tool_call>{"name": NAME, "arguments": {…}}</tool_call>.<|im_end|>\n{% endif %}'
)
TOLERANCE = 2e-3  # of log probabilities, and of probabilities
SUBJECT = "Facts about countries, words and numbers."


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """The address of an engine with the model."""
    with engine_process(*ENGINE, env={"OMP_NUM_THREADS": "1"}, seconds=SECONDS) as (_, address):
        yield address


@pytest.fixture(scope="session")
def port(engine: str) -> Iterator[int]:
    with gateway_process(engine) as (_, port):
        yield port


@pytest.fixture(scope="session")
def tools_port(engine: str) -> Iterator[int]:
    template = TOOLS_BEFORE + (real_model.FOLDER / "chat_template.jinja").read_text()
    with gateway_process(engine, "--tool-call-parser=hermes", f"--chat-template={template}") as (_, port):
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[AsyncOpenAI]:
    async with make_client(port) as made:
        yield made


def make_client(port: int) -> AsyncOpenAI:
    """It repeats what is refused as retryable: on a busy machine, a schema that waits long for its compilation."""
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, timeout=SECONDS)


async def chat(client: AsyncOpenAI, question: str, **options: Any) -> Any:
    """The first choice of a whole answer."""
    messages: Any = real_texts.chat(question)
    completion = await client.chat.completions.create(model=MODEL, messages=messages, **options)
    return completion.choices[0]


async def streamed_chat(client: AsyncOpenAI, question: str, **options: Any) -> Any:
    """The first choice of a streamed answer, as OpenAI's client joins it."""
    messages: Any = real_texts.chat(question)
    state: Any = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


async def test_joined_streams_are_the_whole_answers_at_temperature_1(client: AsyncOpenAI, record: Record) -> None:
    questions = (*real_texts.QUESTIONS, *real_texts.UNICODE)
    options: list[dict[str, Any]] = [
        {"temperature": 1, "seed": seed, "max_tokens": 32} for seed in range(len(questions))
    ]
    wholes = await asyncio.gather(*(chat(client, text, **each) for text, each in zip(questions, options, strict=True)))
    streams = await asyncio.gather(
        *(streamed_chat(client, text, **each) for text, each in zip(questions, options, strict=True))
    )
    assert [each.message.content for each in streams] == [each.message.content for each in wholes]
    assert [each.finish_reason for each in streams] == [each.finish_reason for each in wholes]
    record("joined streams at temperature 1 with a seed", f"{len(streams)} of {len(wholes)} equal the whole answers")


async def test_answers_to_schemas_are_valid_streamed_and_whole(client: AsyncOpenAI, record: Record) -> None:
    async def ask(kind: Any, question: str, schema: Any) -> Any:
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        choice = await kind(client, question, temperature=0, max_tokens=300, response_format=wanted)
        assert choice.finish_reason == "stop", (question, choice.message.content)
        value = json.loads(choice.message.content)
        jsonschema.validate(value, schema)
        return value

    wholes = await asyncio.gather(*(ask(chat, *each) for each in SCHEMAS))
    streams = await asyncio.gather(*(ask(streamed_chat, *each) for each in SCHEMAS))
    assert streams == wholes
    record("schemas, whole and streamed", f"{len(wholes)} of {len(SCHEMAS)} answers valid, and the same")


async def test_required_calls_of_tools_are_valid_streamed_and_whole(tools_port: int, record: Record) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]

    async def ask(client: AsyncOpenAI, kind: Any, question: str) -> list[tuple[str, Any]]:
        choice = await kind(client, question, temperature=0, max_tokens=300, tools=tools, tool_choice="required")
        assert choice.finish_reason == "tool_calls", choice
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        for name, arguments in calls:
            jsonschema.validate(arguments, TOOLS[name])
        assert calls
        return calls

    async with make_client(tools_port) as client:
        wholes = await asyncio.gather(*(ask(client, chat, question) for question in QUESTIONS_FOR_TOOLS))
        streams = await asyncio.gather(*(ask(client, streamed_chat, question) for question in QUESTIONS_FOR_TOOLS))
    assert streams == wholes
    record(
        "tool_choice: required, whole and streamed",
        f"{len(wholes)} of {len(QUESTIONS_FOR_TOOLS)} calls valid, and the same",
    )


@pytest.mark.parametrize("name", real_texts.DOCUMENTS)
async def test_log_probabilities_and_perplexity_of_an_echoed_text(
    client: AsyncOpenAI, name: str, record: Record
) -> None:
    document = real_texts.DOCUMENTS[name]
    completion = await client.completions.create(
        model=MODEL, prompt=document, echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    given: Any = completion.choices[0].logprobs
    token_ids = real_model.tokenizer().encode(document)
    assert len(given.token_logprobs) == len(token_ids) + 1
    rows = real_model.logprobs(real_model.reference(), token_ids)
    ours = torch.tensor(given.token_logprobs[1:-1])
    theirs = rows[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    error = float((ours - theirs).abs().max())
    assert error < TOLERANCE
    best = torch.tensor([max(each.values()) for each in given.top_logprobs[1:-1]])
    torch.testing.assert_close(best, rows[:-1].amax(1), atol=TOLERANCE, rtol=0)
    figures = f"perplexity {math.exp(-float(ours.double().mean())):.4f}"
    figures += f", of transformers {real_model.perplexity(rows, token_ids):.4f}"
    record(
        f"{len(token_ids)} tokens of the text `{name}`, echoed",
        f"{figures}; log probabilities differ by {error:.0e} at most",
    )


async def test_decisions_have_the_probabilities_of_transformers(client: AsyncOpenAI, record: Record) -> None:
    """Predicates are the mean of both orders of their options, choices have one. The report has what an order is worth
    to the model."""
    asked, orders = facts(), (("yes", "no"), ("no", "yes"))
    predicates: list[Any] = [{"type": "predicate", "instructions": question} for question, _ in asked]
    choices: list[Any] = [
        {"type": "choice", "instructions": question, "choices": [{"value": value} for value in order]}
        for order in orders
        for question, _ in asked
    ]
    decision = await client.decisions.create(model=MODEL, input=SUBJECT, questions=[*predicates, *choices])
    answers: Any = decision.answers
    size = len(asked)
    means = [answer.probability for answer in answers[:size]]
    yes_first = [answer.probabilities[0].probability for answer in answers[size : 2 * size]]
    no_first = [answer.probabilities[1].probability for answer in answers[2 * size :]]
    expected = [[probability_of_yes(question, order) for question, _ in asked] for order in orders]
    expected.append([sum(both) / 2 for both in zip(*expected, strict=True)])
    given = [yes_first, no_first, means]
    error = max(
        abs(our - their)
        for ours, theirs in zip(given, expected, strict=True)
        for our, their in zip(ours, theirs, strict=True)
    )
    assert error < TOLERANCE
    truths = [truth for _, truth in asked]
    for name, of in zip(("choices of yes, no", "choices of no, yes", "predicates"), given, strict=True):
        right = sum((each > 0.5) == truth for each, truth in zip(of, truths, strict=True))
        squares = sum((each - truth) ** 2 for each, truth in zip(of, truths, strict=True)) / size
        figures = f"{right} of {size} right; mean probability of yes {sum(of) / size:.3f}; Brier score {squares:.3f}"
        record(f"decisions about facts, {name}", figures)
    record("decisions", f"probabilities differ from transformers by {error:.0e} at most")


def probability_of_yes(question: str, order: tuple[str, str]) -> float:
    """Its share of that of both labels, by `transformers`."""
    tokenizer = real_model.tokenizer()
    options = "\n".join(f"{label}: {option}" for label, option in zip("AB", order, strict=True))
    texts = (SUBJECT, f"Question:\n{question}\n{options}\nAnswer with one label.")
    messages = [{"role": "user", "content": text} for text in texts]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    row = real_model.logprobs(real_model.reference(), tokenizer.encode(text))[-1]
    labels = torch.tensor([tokenizer.encode(label)[0] for label in "AB"])
    return float(row[labels].softmax(0)[order.index("yes")])
