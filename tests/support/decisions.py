"""An engine that gives labels the probabilities of a test, and requests for decisions."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from openai.types import Decision
from tokenizers import AddedToken

from proa.engine.v1 import core_pb2
from support.fake_engine import FakeEngine, prompt_ids, tokenizer_files
from support.gateway import RunningGateway
from support.tokenizers import byte_level_tokenizer

TASKS = (core_pb2.POOLING_TASK_TOKEN_LOGPROBS,)
PREDICATE = {"type": "predicate", "instructions": "Is it late?"}
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ message.content or '' }}<end>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{{ opening }}{% endif %}"
)
Probability = Callable[[str, str], float]


def files(template: str = TEMPLATE) -> dict[str, bytes]:
    """A tokenizer with added tokens around messages."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<start>", "<end>")])
    config = {"eos_token": "<eos>", "chat_template": template, "add_bos_token": False}
    changed = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return tokenizer_files() | changed


def text_of(request: core_pb2.EngineCoreRequest) -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<start>", "<end>")])
    text: str = tokenizer.decode(prompt_ids(request), skip_special_tokens=False)
    return text


def deciding(probability: Probability | None = None, **options: Any) -> FakeEngine:
    """An engine whose model gives each token a probability, by the prompt's text and the token's. Without
    `probability`, that of `A` is 0.6, of each other token 0.1."""
    tokenizer = byte_level_tokenizer()
    chosen = probability or (lambda prompt, token: 0.6 if token == "A" else 0.1)

    def pool(request: core_pb2.EngineCoreRequest) -> list[list[float]]:
        prompt, tokens = text_of(request), request.pooling_params.score_token_ids
        return [[math.log(chosen(prompt, tokenizer.decode([token]))) for token in tokens]]

    return FakeEngine(pooling_tasks=TASKS, pool=pool, **{"files": files(), **options})


async def decide(
    gateway: RunningGateway, *questions: Mapping[str, Any], input: Any = "Hello", **fields: Any
) -> Decision:
    return await gateway.openai.decisions.create(model="fake", input=input, questions=[*questions], **fields)  # type: ignore


async def refusal(gateway: RunningGateway, path: str = "/v1/decisions", **fields: Any) -> tuple[int, str, str]:
    body = {"input": "Hello", "questions": [PREDICATE]} if path == "/v1/decisions" else {}
    response = await gateway.http.post(path, json={**body, **fields})
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]
