"""Requests of the shapes that coding agents send, with default settings, to models with every kind of chat template.

`tests/data/agents` has one file for each client and turn, in our own words: the roles, items, parts, tools, fields and
headers are those that the clients send, Codex other ones to a model whose name it knows. Each text consists of words
that no other text of the request has.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proa import fit_messages
from proa_gateway.serving.tools.offers import UNREADABLE_COMPACTION
from support.chat_images import image_engine
from support.fake_engine import FakeEngine, prompt_ids, say, tokenizer_files
from support.gateway import RunningGateway, running_gateway
from support.scripted_turns import num_common
from support.strict_templates import READS_ALL, STRICT_TEMPLATES, STRICTEST
from support.tokenizers import byte_level_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "agents"
CLIENTS = ("claude-code", "codex", "codex-own-model", "openai-agents", "opencode", "qwen-code")
IMAGES = "5-with-images"
TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}\n"
TEMPLATES = {
    "reads all": READS_ALL,
    **{name: source for name, (source, _) in STRICT_TEMPLATES.items()},
    "strictest": STRICTEST,
}
IMAGE_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "</end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDS = ("event: response.completed", "event: message_stop", "data: [DONE]", '"status":"completed"')
_TOKENIZER = byte_level_tokenizer()


@dataclass(frozen=True, slots=True)
class Recorded:
    """`ignored`: the fields that the header names. `warnings`: for a template with all rules, as names of texts."""

    path: str
    headers: Mapping[str, str]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...]
    body: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        texts = {name: self.body[name] for name in ("instructions", "system", "input", "messages") if name in self.body}
        return re.findall(r"word\d{4}", json.dumps(texts))

    @property
    def tool_names(self) -> list[str]:
        items = [item for item in self.body.get("input", ()) if item.get("type") == "additional_tools"]
        given = [tool for holder in (self.body, *items) for tool in holder.get("tools", ())]
        tools = [*given, *(inner for tool in given for inner in tool.get("tools", ()))]
        names = [tool["function"]["name"] if "function" in tool else tool.get("name") for tool in tools]
        kinds = [tool.get("type") for tool in tools]
        return [name for name, kind in zip(names, kinds, strict=True) if name and kind != "namespace"]


@cache
def recorded(client: str) -> dict[str, Recorded]:
    """The client's requests by turn."""
    files = sorted(FOLDER.glob(f"{client}-[0-9]-*.json"))
    return {file.stem.removeprefix(f"{client}-"): _read(file) for file in files}


def _read(file: Path) -> Recorded:
    fields = json.loads(file.read_text())
    return Recorded(
        fields["path"], fields["headers"], tuple(fields["ignored"]), tuple(fields["warnings"]), fields["body"]
    )


@dataclass(frozen=True, slots=True)
class Answered:
    prompt: str
    ignored: list[str]
    warnings: str  # the header


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with engine, running_gateway(engine, tool_call_parser="hermes") as gateway:
        yield gateway


async def send(request: Recorded, engine: FakeEngine, gateway: RunningGateway) -> Answered:
    response = await gateway.http.post(request.path, json=request.body, headers=dict(request.headers))
    assert response.status_code == 200, response.text
    assert any(end in response.text for end in ENDS), response.text
    prompt = _TOKENIZER.decode(prompt_ids(engine.requests.pop()), skip_special_tokens=False)
    ignored = response.headers.get("x-proa-ignored-fields", "")
    return Answered(prompt, sorted(filter(None, ignored.split(", "))), response.headers.get("x-proa-warnings", ""))


def text_engine(template: str) -> FakeEngine:
    files = tokenizer_files() | {"chat_template.jinja": (TOOLS + template).encode()}
    return FakeEngine(script=say("Done."), files=files, max_model_len=60_000)


def test_there_is_a_file_for_each_client_and_turn() -> None:
    turns = ["1-first", "2-after-a-call", "3-after-an-error", "4-after-a-compaction", IMAGES]
    assert {client: list(recorded(client)) for client in CLIENTS} == dict.fromkeys(CLIENTS, turns)
    assert len(list(FOLDER.iterdir())) == len(CLIENTS) * len(turns)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_every_turn_of_every_client_is_answered_with_all_its_texts(name: str) -> None:
    engine = text_engine(TEMPLATES[name])
    async with serving(engine) as gateway:
        for client in CLIENTS:
            earlier = ""
            for turn, request in recorded(client).items():
                if turn == IMAGES:
                    continue
                answered = await send(request, engine, gateway)
                place = f"{client} {turn}"
                assert [word for word in request.words if word not in answered.prompt] == [], place
                assert [tool for tool in request.tool_names if tool not in answered.prompt] == [], place
                assert answered.ignored == sorted(request.ignored), place
                if not turn.startswith("4"):  # after a compaction the prompt is another one
                    assert num_common(earlier, answered.prompt) >= 0.95 * len(earlier), place
                earlier = answered.prompt.removesuffix("<assistant>")


async def test_a_template_that_reads_all_changes_nothing() -> None:
    engine = text_engine(READS_ALL)
    async with serving(engine) as gateway:
        for client in CLIENTS:
            for turn, request in recorded(client).items():
                if turn != IMAGES:
                    answered = await send(request, engine, gateway)
                    places = [answered.prompt.find(word) for word in request.words]
                    assert places == sorted(places), (client, turn)
                    warnings = [UNREADABLE_COMPACTION] if "UNREADABLE_COMPACTION" in request.warnings else []
                    assert answered.warnings == "; ".join(warnings), (client, turn)


async def test_the_warnings_name_what_the_strictest_template_changes() -> None:
    engine = text_engine(STRICTEST)
    async with serving(engine) as gateway:
        found = {
            f"{client}-{turn}": (await send(request, engine, gateway)).warnings
            for client in CLIENTS
            for turn, request in recorded(client).items()
            if turn != IMAGES
        }
    stated = {
        f"{client}-{turn}": ", ".join(_joined(request.warnings))
        for client in CLIENTS
        for turn, request in recorded(client).items()
        if turn != IMAGES
    }
    assert found == stated


def _joined(names: tuple[str, ...]) -> list[str]:
    """One header for what the API left out, one for what was changed for the template."""
    left_out = [_text(name) for name in names if name == "UNREADABLE_COMPACTION"]
    changed = "; ".join(_text(name) for name in names if name != "UNREADABLE_COMPACTION")
    return [*left_out, *([changed] if changed else [])]


def _text(name: str) -> str:
    return UNREADABLE_COMPACTION if name == "UNREADABLE_COMPACTION" else str(getattr(fit_messages, name))


async def test_images_are_read_where_the_clients_send_them() -> None:
    engine = image_engine(template=TOOLS + IMAGE_TEMPLATE, script=say("Done."), max_model_len=60_000)
    async with serving(engine) as gateway:
        for client in CLIENTS:
            request = recorded(client)[IMAGES]
            response = await gateway.http.post(request.path, json=request.body, headers=dict(request.headers))
            assert response.status_code == 200, (client, response.text)
            assert any(end in response.text for end in ENDS), response.text
            body = json.dumps(request.body)
            num_images = body.count("image/png;base64") + body.count('"media_type": "image/png"')
            assert num_images > 0
            assert len(engine.requests.pop().images) == num_images, client
