"""Greedy tokens behind prompt embeddings equal those of `transformers`, with every scheduling feature."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.offline.llm import LLM
from support.engine import Engine, build_core, request, run
from support.greedy import Expected, greedy
from support.prompt_embeds import embedded, input_embeddings, whole
from support.tiny_models import BYTES, VOCAB_SIZE, make_tiny_model

NUM_TOKENS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ALL_ON: dict[str, Any] = {
    "max_model_len": 128,
    "block_size": 8,
    "max_num_batched_tokens": 48,  # chunked prefill
    "num_gpu_blocks_override": 40,  # preemption
    "enable_prompt_embeds": True,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "granite": {"embedding_multiplier": 3.0},
    "qwen3_5_text": {},
}


def make_prompts() -> list[list[int]]:
    """Prompts of up to 90 tokens, some with a common prefix."""
    rows = random.Random(7)
    shared = rows.choices(range(BYTES), k=40)
    prompts = [rows.choices(range(BYTES), k=rows.randint(1, 90)) for _ in range(9)]
    return prompts + [shared + rows.choices(range(BYTES), k=rows.randint(1, 20)) for _ in range(6)]


PROMPTS = make_prompts()


def requests(values: Sequence[Tensor]) -> list[EngineCoreRequest]:
    """Of every three prompts one as embeddings, one with a piece of embeddings, and one as tokens."""
    rows, made = random.Random(8), []
    for index, prompt in enumerate(PROMPTS):
        wanted = request(str(index), prompt, PARAMS)
        if index % 3 == 0:
            wanted = whole(wanted, values[index])
        elif index % 3 == 1:
            start, stop = sorted((rows.randint(0, len(prompt)), rows.randint(0, len(prompt))))
            wanted = embedded(wanted, values[index], [range(start, stop)] if start < stop else [])
        made.append(wanted)
    return made


def check(actual: Sequence[list[int]], expected: Sequence[Expected]) -> None:
    for index, (told, want) in enumerate(zip(actual, expected, strict=True)):
        assert told[: want.num_sure] == want.token_ids[: want.num_sure], f"prompt {index}"
    assert sum(want.num_sure for want in expected) > 0.9 * len(expected) * NUM_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@pytest.fixture(scope="module")
def values(folder: Path) -> list[Tensor]:
    """Of each prompt."""
    return input_embeddings(folder, PROMPTS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Expected]:
    return greedy(folder, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with build_core(folder, poison=True, block_seed=1, **ALL_ON) as engine:
        yield engine


def test_embeddings_of_tokens_give_the_tokens_of_transformers(
    engine: Engine, values: list[Tensor], expected: list[Expected]
) -> None:
    results = run(engine, requests(values))
    check([result.token_ids for result in results.values()], expected)
    assert engine.core.stats().num_preemptions > 0
    assert engine.core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_embeddings_of_tokens_give_the_tokens_of_transformers_in_other_families(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family, seed=3, **OTHER_FAMILIES[family])
    with build_core(folder, poison=True, block_seed=1, **ALL_ON) as engine:
        results = run(engine, requests(input_embeddings(folder, PROMPTS)))
        stats = engine.core.stats()
    check([result.token_ids for result in results.values()], greedy(folder, PROMPTS, NUM_TOKENS))
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("config", [{"async_scheduling": False}, {"speculative_config": NGRAM}], ids=["sync", "drafts"])
def test_schedules_do_not_change_the_tokens(
    folder: Path, values: list[Tensor], expected: list[Expected], config: dict[str, Any]
) -> None:
    with build_core(folder, poison=True, block_seed=1, **ALL_ON, **config) as engine:
        results = run(engine, requests(values))
    check([result.token_ids for result in results.values()], expected)


def test_embeddings_of_no_token_give_the_tokens_of_transformers(folder: Path, engine: Engine) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [0.3 * torch.randn(length, 64, generator=generator) for length in (1, 30, 90)]
    found = run(engine, [whole(request(str(len(each)), [0] * len(each), PARAMS), each) for each in values])
    check([result.token_ids for result in found.values()], [behind_embeddings(folder, each) for each in values])


@torch.inference_mode()
def behind_embeddings(folder: Path, values: Tensor) -> Expected:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    embeddings, token_ids, num_sure = values, list[int](), NUM_TOKENS
    for step in range(NUM_TOKENS):
        best = model(inputs_embeds=embeddings[None]).logits[0, -1].topk(2)
        if float(best.values[0] - best.values[1]) < 1e-4:
            num_sure = min(num_sure, step)
        token_ids.append(int(best.indices[0]))
        embeddings = torch.cat([embeddings, model.get_input_embeddings()(best.indices[:1])])
    return Expected(token_ids, num_sure)


def test_a_hit_needs_the_same_embeddings(folder: Path, values: list[Tensor]) -> None:
    same = values[-1]
    other = same.clone()
    other[20] += 1
    with build_core(folder, **ALL_ON) as engine:

        def cached(name: str, embeddings: Tensor) -> int:
            wanted = whole(request(name, [0] * len(embeddings), PARAMS), embeddings)
            return run(engine, [wanted])[name].num_cached_tokens

        assert cached("first", same) == 0
        assert cached("again", same) == (len(same) - 1) // 8 * 8
        assert cached("another from the third block on", other) == 16
        assert cached("in another type", same.half()) == 0
        assert run(engine, [request("zeros", [0] * len(same), PARAMS)])["zeros"].num_cached_tokens == 0


def test_a_resumed_request_continues_as_if_it_was_never_cut(engine: Engine, values: list[Tensor]) -> None:
    expected = run(engine, [whole(request("all", PROMPTS[1], PARAMS), values[1])])["all"].token_ids
    rest = run(engine, [whole(request("rest", PROMPTS[1], PARAMS, resumed=expected[:5]), values[1])])["rest"]
    assert rest.token_ids == expected[5:]


def test_penalties_and_bad_words_skip_embedded_tokens(engine: Engine, values: list[Tensor]) -> None:
    """Whatever the ids that the embeddings stand for, only the output and the prompt's other tokens count."""
    prompt, style = PROMPTS[1], {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}

    def told(name: str, pieces: Sequence[range], **params: Any) -> list[int]:
        wanted = request(name, prompt, SamplingParams(**style | params))
        return run(engine, [embedded(wanted, values[1], pieces)])[name].token_ids

    everything, plain = [range(len(prompt))], told("plain", [], max_tokens=1)
    assert told("one", everything, max_tokens=1, repetition_penalty=1000.0, presence_penalty=2.0) == plain
    first, last = plain[0], prompt[-1]
    assert told("bad", everything, max_tokens=1, bad_words_token_ids=((0, first), (last, first))) == plain
    assert (
        told("bad behind a token", [range(len(prompt) - 1)], max_tokens=1, bad_words_token_ids=((last, first),))
        != plain
    )
    whole_output = told("penalties", everything, repetition_penalty=1000.0)
    assert len(set(whole_output)) == NUM_TOKENS, "tokens of the output count"


@pytest.mark.parametrize("family", ["gemma4_text", "starcoder2"])
def test_models_that_need_token_ids_are_refused(family: str, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "global_head_dim": 32,
    }
    folder = make_tiny_model(tmp_path, family, **(overrides if family == "gemma4_text" else {}))
    with pytest.raises(ValueError, match="enable_prompt_embeds is not supported for"), build_core(folder, **ALL_ON):
        pass


def test_the_offline_llm_takes_a_tensor(folder: Path, values: list[Tensor]) -> None:
    tensor = values[1]
    llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=128, enable_prompt_embeds=True)
    try:
        prompts: list[Any] = [{"prompt_embeds": tensor}, {"prompt_embeds": tensor[None]}, PROMPTS[1]]
        first, batch, tokens = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert first.outputs[0].token_ids == batch.outputs[0].token_ids == tokens.outputs[0].token_ids
        for wrong, message in (
            (tensor[0], "shape"),
            (tensor.double(), "float32, float16 or bfloat16"),
            (tensor[:, 1:], "hidden size"),
            (tensor * torch.inf, "infinite or not a number"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate({"prompt_embeds": wrong}, PARAMS, use_tqdm=False)
    finally:
        llm.llm_engine.shutdown()
