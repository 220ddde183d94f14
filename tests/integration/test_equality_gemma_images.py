"""Greedy tokens behind Gemma 3's images, whose tokens attend to all of their image, equal those of `transformers`."""

from dataclasses import replace
from pathlib import Path

import pytest

from proa.contract import EngineCoreRequest, ImageInput
from proa.image.placeholders import place_media
from proa.image.prepare import prepare_pillow
from support.engine import build_core, request, run
from support.image_chats import PARAMS, WIDE, Case, Chat, image_input_of, make_case
from support.image_models import chat_tokens, make_image_model

BLOCK_SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("images") / "gemma3", "gemma3", seed=3)


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return make_case(folder)


def test_batched_tokens_equal_those_of_transformers(case: Case) -> None:
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 6, "num_gpu_blocks_override": 42}
    with build_core(case.folder, max_model_len=96, block_size=4, poison=True, block_seed=1, **settings) as engine:
        case.check(case.generate(engine))
        case.check(case.generate(engine))
        assert engine.core.stats().prefix_cache_hits > 0


def test_a_hit_within_an_image_changes_no_token(folder: Path) -> None:
    def chat(image_input: ImageInput, text: str) -> EngineCoreRequest:
        parts = Chat(("x" * padding, WIDE, text))
        image = prepare_pillow(WIDE, image_input)
        prompt = chat_tokens(folder, parts.messages, parts.images)
        return replace(request(text, prompt, PARAMS), images=place_media(prompt, [image], image_input))

    tokens = []
    for is_cached in (True, False):
        with build_core(folder, max_model_len=200, block_size=BLOCK_SIZE, poison=True) as engine:
            image_input = image_input_of(engine)
            padding = 0
            (image,) = chat(image_input, "").images
            padding = (56 - image.offset) % BLOCK_SIZE  # half of it is in the last full block of the prompt
            if is_cached:
                run(engine, [chat(image_input, "Who?")])
            (result,) = run(engine, [chat(image_input, "Is it?")]).values()
            hits = engine.core.stats().prefix_cache_hits
        tokens.append(result.token_ids)
        offset = image.offset + padding
        assert hits == (offset + 8 if is_cached else 0)
    assert tokens[0] == tokens[1]
