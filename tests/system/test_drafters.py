"""A drafter that reads hidden states changes no token: with random drafts, trained ones and drafts of which 70 % are
right; greedy and sampled, asynchronous or not, with hits, chunks and preemption, at every limit, with adapters and on
two ranks. And the built-in model's drafter is right as often as it was when it was trained."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa.contract import FinishReason, PoolingParams, PoolingTask, SamplingParams
from proa_engine import LLM, LoRARequest
from proa_engine.builtin import builtin_model_folder
from proa_engine.core.grammar import Grammars
from proa_engine.grammar import LLGuidanceGrammars
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.models.drafters.base import Entries
from proa_engine.models.drafters.eagle3 import Eagle3Drafter
from proa_engine.step.hidden_drafts import LayerDrafts
from support.builtin_questions import greedy_questions
from support.cache_families import make_cache_family
from support.draft_requests import (
    BLOCK,
    CONFIG,
    SETTINGS,
    assert_same,
    prompt,
    replayed,
    requests,
    settings_of,
    whole,
)
from support.drafters import write_eagle3
from support.engine import Engine, Result, build_core, pooled, request, run, tokens
from support.fake_grammar import constrained
from support.grammar_requests import grammar_requests, grammars_for
from support.host_rounds import HOST, rounds
from support.mtp_models import make_mtp_model
from support.oracle_drafts import CHANGING
from support.prompt_embeds import embedded, input_embeddings
from support.scripted_drafts import scripted_drafts, seven_of_ten
from support.tiny_models import BYTES, EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model

_METHODS = {1: "greedy", 3: "auto", 5: "probabilistic"}  # by K
_BUILTIN: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 48}


def drafts(folder: Path, num_speculative_tokens: int = 3, **options: Any) -> SpeculativeConfig:
    settings = {"model": str(folder), "num_speculative_tokens": num_speculative_tokens, **options}
    return SpeculativeConfig.from_mapping({"method": "eagle3", **settings})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), "qwen3", seed=8)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("drafter"), target)


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Engine]:
    with build_core(target, **CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict[str, Result]:
    return run(plain, requests())


def features(engine: Engine) -> LayerDrafts:
    (found,) = (each for each in engine.executor._worker.model_runner._batch.features if isinstance(each, LayerDrafts))
    return found


@pytest.mark.parametrize(("num_drafts", "is_async", "has_hits", "num_blocks"), SETTINGS)
def test_random_drafts_change_no_token(
    target: Path,
    drafter: Path,
    expected: dict[str, Result],
    num_drafts: int,
    is_async: bool,
    has_hits: bool,
    num_blocks: int,
) -> None:
    settings = settings_of(is_async=is_async, has_hits=has_hits, num_blocks=num_blocks)
    with build_core(
        target,
        poison=True,
        speculative_config=drafts(drafter, num_drafts, draft_sample_method=_METHODS[num_drafts]),
        **CONFIG,
        **settings,
    ) as engine:
        for _ in range(1 + has_hits):
            results = run(engine, requests())
            assert_same(results, expected)
        stats, counters = engine.core.stats(), engine.core.counters()
    assert (stats.num_preemptions > 0) == (num_blocks == 60)
    assert any(result.num_cached_tokens for result in results.values()) == has_hits
    assert counters.drafts.num_accepted_tokens < counters.drafts.num_draft_tokens


@pytest.mark.parametrize(("num_drafts", "is_async", "has_hits", "num_blocks"), SETTINGS)
def test_drafts_of_which_70_percent_are_right_change_no_token(
    target: Path,
    drafter: Path,
    expected: dict[str, Result],
    num_drafts: int,
    is_async: bool,
    has_hits: bool,
    num_blocks: int,
) -> None:
    settings = settings_of(is_async=is_async, has_hits=has_hits, num_blocks=num_blocks)
    with (
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(target, poison=True, speculative_config=drafts(drafter, num_drafts), **CONFIG, **settings) as engine,
    ):
        for _ in range(1 + has_hits):
            assert_same(run(engine, requests()), expected)
        stats, counters = engine.core.stats(), engine.core.counters()
    assert (stats.num_preemptions > 0) == (num_blocks == 60)
    first = counters.drafts.num_accepted_per_position[0] / counters.drafts.num_drafts
    assert 0.6 < first < 0.8


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_are_the_same_where_the_number_of_drafts_follows_the_load(
    target: Path, drafter: Path, expected: dict[str, Result], async_scheduling: bool
) -> None:
    config = drafts(drafter, 3, num_speculative_tokens_per_batch_size=CHANGING)
    settings: dict[str, Any] = {"speculative_config": config, "async_scheduling": async_scheduling, "max_num_seqs": 7}
    with (
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(target, poison=True, **CONFIG, **settings) as engine,
    ):
        assert_same(run(engine, requests()), expected)
        assert any(len(plan.decode_request_ids) - len(plan.cached_requests) >= 4 for plan in engine.plans)
        assert engine.core.counters().drafts.num_accepted_tokens > 40


@pytest.mark.parametrize("schedule", [None, CHANGING])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_equal_those_of_replayed_steps(
    target: Path,
    drafter: Path,
    expected: dict[str, Result],
    async_scheduling: bool,
    schedule: Sequence[Sequence[int]] | None,
) -> None:
    """One graph proposes and runs the model, a second one computes the drafter's entries."""
    config = drafts(drafter, 3, num_speculative_tokens_per_batch_size=schedule)
    settings: dict[str, Any] = {"speculative_config": config, "async_scheduling": async_scheduling}
    with (
        replayed(3) as capture,
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(target, poison=True, max_num_seqs=4, **CONFIG, **settings) as engine,
    ):
        assert_same(run(engine, requests()), expected)
        assert engine.core.counters().drafts.num_accepted_tokens > 5
        assert capture.num_replays == capture.num_draws > len(engine.plans) / 4


def test_replayed_steps_propose_what_others_do(target: Path, drafter: Path) -> None:
    """As many draft tokens are accepted, by place and by way to draw, with graphs as without."""
    found = []
    for graphs in (replayed(3), nullcontext()):
        with (
            graphs,
            build_core(target, poison=True, speculative_config=drafts(drafter), max_num_seqs=3, **CONFIG) as engine,
        ):
            run(engine, requests())
            counters = engine.core.counters()
            found.append((counters.drafts.num_accepted_per_position, counters.drafts.num_matches))
    assert found[0] == found[1]
    assert found[0][0][0] > 0


@contextmanager
def recorded_calls() -> Iterator[list[tuple[str, int]]]:
    """The calls of drafters meanwhile, in their order: the method and its number of rows."""
    calls: list[tuple[str, int]] = []

    def recording(name: str) -> Callable[..., Any]:
        method = getattr(Eagle3Drafter, name)

        def call(drafter: Eagle3Drafter, rows: Entries | torch.Tensor, *others: Any) -> Any:
            calls.append((name, len(rows.read if isinstance(rows, Entries) else rows)))
            return method(drafter, rows, *others)

        return call

    with ExitStack() as stack:
        for name in ("observe", "__call__", "compute_logits"):
            stack.enter_context(mock.patch.object(Eagle3Drafter, name, recording(name)))
        yield calls


@pytest.mark.parametrize("is_replayed", [False, True])
def test_the_drafters_whole_layer_is_computed_for_draft_tokens_alone(
    target: Path, drafter: Path, is_replayed: bool
) -> None:
    """A step without draft tokens stores entries. One with them computes for each a row of each request."""
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    config = drafts(drafter, 2, num_speculative_tokens_per_batch_size=[[1, 1, 0], [2, 64, 2]])
    settings = CONFIG | {"speculative_config": config, "async_scheduling": False, "max_num_seqs": 4}
    with (
        replayed(2) if is_replayed else nullcontext(),
        recorded_calls() as calls,
        build_core(target, poison=True, **settings) as engine,
    ):
        calls.clear()  # those of the start
        run(engine, [request("alone", prompt(4)[:20], params)])
        assert calls == [("observe", 20)] + [("observe", 1)] * 6
        calls.clear()
        for name, start in (("first", 2), ("second", 6)):
            engine.core.submit(request(name, prompt(start)[:20], params))
        for _ in range(2):
            engine.core.step()
        proposed = [("__call__", 2), ("compute_logits", 2)] * 2
        assert calls == [("observe", 40), *proposed, ("observe", 6)]


def test_rejected_drafts_leave_no_trace_in_the_drafters_cache(
    target: Path, drafter: Path, expected: dict[str, Result]
) -> None:
    """Five drafts, all rejected, across a block's end: then the drafter chooses as for a new request with these
    tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    start = prompt(6)[: 3 * BLOCK - 3]
    with build_core(target, **CONFIG) as engine:
        output = run(engine, [request("plain", start, params)])["plain"].token_ids
    right = {tuple([*start, *output[:count]]): token for count, token in enumerate(output)}
    with (
        scripted_drafts(lambda tokens, choice: (right.get(tokens, choice) + 1) % 200) as rejected,
        build_core(target, poison=True, speculative_config=drafts(drafter, 5), **CONFIG) as engine,
    ):
        assert run(engine, [request("drafted", start, params)])["drafted"].token_ids == output
        assert engine.core.counters().drafts.num_accepted_tokens == 0
    with (
        scripted_drafts(lambda tokens, choice: choice) as fresh,
        build_core(target, speculative_config=drafts(drafter, 1), enable_prefix_caching=False, **CONFIG) as engine,
    ):
        for count in range(2, 20):  # the first token comes with the prompt
            known = [*start, *output[:count]]
            run(engine, [request("new", known[:-1], replace(params, max_tokens=3))])
            assert fresh[tuple(known)] == rejected[tuple(known)]


def test_two_requests_part_exactly_at_a_blocks_end(target: Path, drafter: Path, plain: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    shared = prompt(5)[: 3 * BLOCK]
    wanted = [request(str(token), [*shared, token, token + 1], params) for token in (60, 70, 80)]
    alone = run(plain, wanted)
    with build_core(target, poison=True, speculative_config=drafts(drafter), **CONFIG) as engine:
        first = run(engine, wanted[:1])
        blocks = engine.plans[0].new_requests[0].block_ids[0][:3]
        (cache,) = engine.executor._worker.model_runner.memory.drafter_layers
        before = [tensor[blocks].clone() for tensor in cache.tensors]
        results = first | run(engine, wanted[1:])
        assert tokens(results) == tokens(alone)
        assert [results[each.request_id].num_cached_tokens for each in wanted] == [0, 24, 24]
        for tensor, kept in zip(cache.tensors, before, strict=True):
            assert not kept.isnan().any()
            assert torch.equal(tensor[blocks], kept)


def test_a_hit_of_all_but_one_token_drafts_nothing_in_its_first_step(
    target: Path, drafter: Path, plain: Engine
) -> None:
    """The slot has what another request left, here NaN."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    known = prompt(6)[: 4 * BLOCK + 1]
    wanted = [request("first", known, params)]
    alone = run(plain, wanted)["first"].token_ids
    with build_core(target, speculative_config=drafts(drafter), max_num_seqs=1, **CONFIG) as engine:
        run(engine, wanted)
        features(engine)._carry.fill_(torch.nan)
        before = engine.core.counters()
        result = run(engine, [request("again", known, replace(params, max_tokens=1))])["again"]
        after = engine.core.counters()
        assert (result.token_ids, result.num_cached_tokens) == (alone[:1], 4 * BLOCK)
        assert after.drafts.num_draft_tokens == before.drafts.num_draft_tokens
        features(engine)._carry.fill_(torch.nan)
        assert run(engine, [request("whole", known, params)])["whole"].token_ids == alone
        assert engine.core.counters().drafts.num_draft_tokens > after.drafts.num_draft_tokens


def test_a_stop_token_inside_accepted_drafts_while_a_step_is_in_flight(
    target: Path, drafter: Path, expected: dict[str, Result]
) -> None:
    """The next request gets the slot and its blocks."""
    sequences = whole(expected, requests())
    following = {tuple(each[:count]): each[count] for each in sequences.values() for count in range(len(each))}
    stops = {name: result.token_ids[6] for name, result in expected.items()}
    wanted = [
        replace(each, sampling_params=replace(each.sampling_params, stop_token_ids=(stops[each.request_id],)))
        for each in requests()
    ]
    settings = {"max_num_seqs": 1, "num_gpu_blocks_override": 22}
    with (
        scripted_drafts(lambda tokens, choice: following.get(tokens, choice)),
        build_core(target, poison=True, speculative_config=drafts(drafter, 4), **CONFIG, **settings) as engine,
    ):
        results = run(engine, wanted)
    for name, result in expected.items():
        length = result.token_ids.index(stops[name]) + 1
        assert results[name].token_ids == result.token_ids[:length]
        assert results[name].finish_reason is FinishReason.STOP


def test_a_resumed_request_continues_with_drafts(target: Path, drafter: Path, expected: dict[str, Result]) -> None:
    """As on another engine after a failover: it has tokens of the output, and no state of the drafter."""
    resumed = [
        replace(each, resumed_token_ids=expected[each.request_id].token_ids[: 1 + int(each.request_id) % 15])
        for each in requests()
    ]
    with (
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(target, poison=True, speculative_config=drafts(drafter), **CONFIG) as engine,
    ):
        results = run(engine, resumed)
        assert engine.core.counters().drafts.num_accepted_tokens > 50
    for name, result in results.items():
        assert result.token_ids == expected[name].token_ids[1 + int(name) % 15 :]


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_limits_of_max_tokens_and_max_model_len(target: Path, drafter: Path, plain: Engine, num_drafts: int) -> None:
    """Rows with fewer drafts than others, and none: no token behind a request's end reaches another one's table."""
    wanted = [
        request(
            f"{length} {index}",
            [(index * 17 + place) % BYTES for place in range(length)],
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, key=index),
        )
        for index, (length, max_tokens) in enumerate(
            [
                (158, None),
                (157, None),
                (155, None),
                (150, None),
                (20, 1),
                (20, 2),
                (20, 3),
                (1, 7),
                (140, None),
                (2, 60),
            ]
        )
    ]
    alone = run(plain, wanted)
    with (
        scripted_drafts(seven_of_ten(whole(alone, wanted))),
        build_core(target, poison=True, speculative_config=drafts(drafter, num_drafts), **CONFIG) as engine,
    ):
        assert_same(run(engine, wanted), alone)


def test_a_draft_vocabulary_proposes_ids_of_the_model(
    target: Path, tmp_path: Path, expected: dict[str, Result]
) -> None:
    """The same drafter with its vocabulary in another order proposes the same tokens."""
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    drafted = []
    for name, ids in (("identity", torch.arange(VOCAB_SIZE)), ("permuted", order)):
        folder = write_eagle3(tmp_path / name, target, draft_ids=ids)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = load_file(tmp_path / "identity" / "model.safetensors")["lm_head.weight"][ids]
        save_file(weights, folder / "model.safetensors")
        with (
            scripted_drafts(lambda tokens, choice: choice) as choices,
            build_core(target, speculative_config=drafts(folder), async_scheduling=False, **CONFIG) as engine,
        ):
            assert_same(run(engine, requests()), expected)
        drafted.append(dict(choices))
    assert drafted[0] == drafted[1]


def test_two_ranks_propose_and_accept_the_same_tokens(target: Path, drafter: Path, expected: dict[str, Result]) -> None:
    with build_core(target, tensor_parallel_size=2, speculative_config=drafts(drafter), **CONFIG) as engine:
        results = run(engine, requests()[:8])
        assert engine.core.counters().drafts.num_draft_tokens > 100
    equal = [result.token_ids == expected[name].token_ids for name, result in results.items()]
    assert sum(equal) >= len(equal) - 1  # the ranks' sums may round differently where two logits are close


def test_pooled_requests_and_prompt_embeddings_beside_drafts(target: Path, drafter: Path) -> None:
    (values,) = input_embeddings(target, [prompt(6)])
    scored = PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(3, 4))
    wanted = [
        *requests()[:6],
        pooled("pooled", prompt(3), scored),
        embedded(replace(requests()[6], request_id="embedded"), values, [range(5, 30)]),
    ]
    results = []
    for config in (None, drafts(drafter)):
        settings = CONFIG | {"speculative_config": config, "enable_prompt_embeds": True}
        with build_core(target, poison=config is not None, **settings) as engine:
            results.append(run(engine, wanted))
    plain, drafted = results
    assert tokens(plain) == tokens(drafted)
    assert plain["pooled"].pooled == drafted["pooled"].pooled


@pytest.mark.parametrize("family", ["windows", "latent"])
def test_drafts_change_no_token_with_windows_and_latents(tmp_path: Path, family: str) -> None:
    folder = make_cache_family(tmp_path / "model", family)
    layer = {"head_dim": 16, "num_key_value_heads": 2, "rope_parameters": None}
    drafter = write_eagle3(tmp_path / "drafter", folder, layer=layer)
    with build_core(folder, **CONFIG) as engine:
        expected = run(engine, requests())
    with (
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(folder, poison=True, speculative_config=drafts(drafter), max_num_seqs=12, **CONFIG) as engine,
    ):
        for _ in range(2):
            assert_same(run(engine, requests()), expected)
        assert engine.core.counters().drafts.num_accepted_tokens > 100


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo", "qwen3_next", "qwen3_5_text"])
def test_the_models_own_layer_for_further_tokens_changes_no_token(tmp_path: Path, family: str) -> None:
    """Of recurrent models and one other also in replayed steps."""
    folder, _ = make_mtp_model(tmp_path, family)
    with build_core(folder, **CONFIG) as engine:
        expected = run(engine, requests())
    config = SpeculativeConfig(method="mtp")
    with (
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(folder, poison=True, speculative_config=config, max_num_seqs=12, **CONFIG) as engine,
    ):
        for _ in range(2):
            assert tokens(run(engine, requests())) == tokens(expected)
        assert engine.core.counters().drafts.num_accepted_tokens > 100
    if family in ("glm4_moe", "qwen3_5_text"):
        with (
            replayed(3) as capture,
            scripted_drafts(seven_of_ten(whole(expected, requests()))),
            build_core(folder, poison=True, speculative_config=config, max_num_seqs=4, **CONFIG) as engine,
        ):
            assert tokens(run(engine, requests())) == tokens(expected)
            assert capture.num_draws > len(engine.plans) / 4


@pytest.mark.parametrize(
    ("family", "is_text"), [("glm4_moe", False), ("qwen3_5_text", False), ("glm4_moe", True), ("qwen3_5_text", True)]
)
def test_the_models_own_layer_drafts_under_grammars(tmp_path: Path, family: str, is_text: bool) -> None:
    """Grammars over token ids, or Lark grammars and those of tool calls."""
    folder, _ = make_mtp_model(tmp_path, family)
    with ExitStack() as stack:
        grammars: Grammars
        if is_text:
            wanted = grammar_requests(folder, [each.prompt_token_ids for each in requests()], max_tokens=40)
            grammars = stack.enter_context(grammars_for(folder, VOCAB_SIZE, [EOS_TOKEN_ID]))
        else:
            wanted, grammars = constrained(requests(), VOCAB_SIZE)
        with build_core(folder, grammars=grammars, **CONFIG) as engine:
            expected = run(engine, wanted)
        settings = {"speculative_config": SpeculativeConfig(method="mtp"), "grammars": grammars, **CONFIG}
        stack.enter_context(scripted_drafts(seven_of_ten(whole(expected, wanted))))
        engine = stack.enter_context(build_core(folder, poison=True, max_num_seqs=12, **settings))
        for _ in range(2):
            assert tokens(run(engine, wanted)) == tokens(expected)
        counters = engine.core.counters()
        assert counters.num_forced_tokens > 50
        assert counters.drafts.num_accepted_tokens > 40


def test_host_memory_keeps_what_the_drafter_knows() -> None:
    """Blocks come back with their entries: as many drafts are accepted as where nothing is evicted."""
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 48}
    settings["speculative_config"] = drafts(Path("builtin"))
    found, accepted = [], []
    for more in ({"num_gpu_blocks_override": 600}, {"num_gpu_blocks_override": 17, **HOST}):
        with build_core("builtin", poison=True, **settings | more) as engine:
            found.append([result.token_ids for result in rounds(engine)])
            counters, host = engine.core.counters(), engine.core.counters().cache.host
            accepted.append(counters.drafts.num_accepted_tokens / counters.drafts.num_drafts)
    assert found[0] == found[1]
    assert host is not None
    assert host.num_loaded_tokens > 500
    assert accepted[1] == pytest.approx(accepted[0], rel=0.05)


def test_requests_with_adapters_have_drafts_of_a_drafter_without_one() -> None:
    asked = ["<|begin|><|user|>What is the capital of France?<|end|><|assistant|>"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    texts = []
    for config in (None, drafts(Path("builtin"))):
        llm = LLM("builtin", enable_lora=True, max_model_len=256, speculative_config=config)
        for adapter in (LoRARequest("sailor", 1, "builtin:sailor"), None):
            (output,) = llm.generate(asked, params, lora_request=adapter, use_tqdm=False)
            texts.append(output.outputs[0].text)
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


@pytest.fixture(scope="module")
def builtin_grammars() -> Iterator[LLGuidanceGrammars]:
    fields = json.loads((builtin_model_folder() / "config.json").read_text())
    with grammars_for(builtin_model_folder(), fields["vocab_size"], [fields["eos_token_id"]]) as grammars:
        yield grammars


@pytest.fixture(scope="module")
def builtin_plain(builtin_grammars: LLGuidanceGrammars) -> Iterator[Engine]:
    with build_core("builtin", grammars=builtin_grammars, **_BUILTIN) as engine:
        yield engine


@pytest.fixture(scope="module")
def builtin_drafting(builtin_grammars: LLGuidanceGrammars) -> Iterator[Engine]:
    config = drafts(Path("builtin"), 4)
    with build_core("builtin", poison=True, grammars=builtin_grammars, speculative_config=config, **_BUILTIN) as engine:
        yield engine


def test_the_built_in_models_drafter_is_as_good_as_when_it_was_trained(
    builtin_plain: Engine, builtin_drafting: Engine
) -> None:
    """Tokens a step, with four draft tokens and greedy requests. The drafter's own training shows 3.9."""
    wanted = greedy_questions()
    assert_same(run(builtin_drafting, wanted), run(builtin_plain, wanted))
    counters = builtin_drafting.core.counters()
    assert 1 + counters.drafts.num_accepted_tokens / counters.drafts.num_drafts > 3.5


def test_lark_grammars_and_tool_calls_with_drafts_of_the_built_in_models_drafter(
    builtin_plain: Engine, builtin_drafting: Engine
) -> None:
    prompts = [each.prompt_token_ids for each in greedy_questions()]
    wanted = grammar_requests(builtin_model_folder(), prompts, max_tokens=48)
    before = builtin_drafting.core.counters()
    assert_same(run(builtin_drafting, wanted), run(builtin_plain, wanted))
    after = builtin_drafting.core.counters()
    assert after.num_forced_tokens - before.num_forced_tokens > 100
    assert after.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens > 40
