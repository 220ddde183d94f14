"""The offline `LLM` with a tiny model, used as vLLM's is."""

import gc
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from proa_engine import LLM, CompletionOutput, LLMEngine, RequestOutput, SamplingParams
from proa_engine.config import EngineConfig
from support.gguf_files import write_gguf
from support.tiny_models import EOS_TOKEN_ID, make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The sea", "A boat with two unlike hulls", "Why?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64, max_num_batched_tokens=64)


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids


def only(outputs: list[RequestOutput]) -> CompletionOutput:
    ((completion,),) = (output.outputs for output in outputs)
    return completion


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.prompt_token_ids for output in outputs] == [list(prompt.encode()) for prompt in PROMPTS]
    assert all(output.finished for output in outputs)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert tokens(output) == tokens(llm.generate(prompt, GREEDY, use_tqdm=False)[0])


def test_a_gguf_file_gives_the_outputs_of_its_folder(llm: LLM, folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf")
    other = LLM(str(path), dtype="float32", max_model_len=128, num_gpu_blocks_override=64, max_num_batched_tokens=64)
    question = [{"role": "user", "content": "What is a proa?"}]
    for ours, theirs in zip(other.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY), strict=True):
        assert (tokens(ours), ours.outputs[0].text) == (tokens(theirs), theirs.outputs[0].text)
    assert tokens(other.chat(question, GREEDY)[0]) == tokens(llm.chat(question, GREEDY)[0])


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    output = only(llm.generate("The sea", GREEDY, use_tqdm=False))

    assert llm.llm_engine.tokenizer is not None
    assert output.text == llm.llm_engine.tokenizer.decode(output.token_ids)


def test_prompts_of_token_ids(llm: LLM) -> None:
    ids = list(b"Why?")
    prompts: list[Any] = ["Why?", {"prompt_token_ids": ids}, ids]
    of_text, *of_ids = llm.generate(prompts, GREEDY, use_tqdm=False)
    of_ids += llm.generate(ids, GREEDY, use_tqdm=False)

    assert [tokens(output) for output in of_ids] == [tokens(of_text)] * 3
    assert [output.prompt for output in of_ids] == [None] * 3


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 5)]

    outputs = llm.generate(["A", "B"], params, use_tqdm=False)

    assert [len(tokens(output)) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="3 prompts need one SamplingParams, or 3, not 2"):
        llm.generate(["A", "B", "C"], params, use_tqdm=False)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, [{"max_tokens": 2}]])
def test_parameters_that_are_no_sampling_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params must be a SamplingParams or a list of them, got"):
        llm.generate("A", params, use_tqdm=False)


@pytest.mark.parametrize("prompt", [None, 5])
def test_an_object_that_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match=f"a prompt must be text, token ids, .* got {prompt}"):
        llm.generate(prompt, use_tqdm=False)


@pytest.mark.parametrize("messages", ["Hi", ["Hi"], [["Hi"]], {"role": "user"}])
def test_a_conversation_that_is_no_list_of_messages_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages must be a list of messages, or of such lists, got"):
        llm.chat(messages, use_tqdm=False)


def test_choices_differ_and_are_reproduced_by_a_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=12, ignore_eos=True)

    first, again = (llm.generate("The", params, use_tqdm=False)[0] for _ in range(2))
    other = llm.generate("The", SamplingParams(n=4, temperature=1.5, max_tokens=12, ignore_eos=True), use_tqdm=False)

    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 4
    assert first.outputs == again.outputs
    assert [choice.token_ids for choice in first.outputs] != [choice.token_ids for choice in other[0].outputs]


def test_requests_without_seed_are_reproduced_by_the_engines_seed(folder: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        llm = LLM(str(folder), seed=seed, max_model_len=64, kv_cache_memory_bytes=2**20)
        outputs = llm.generate(["The", "The"], params, use_tqdm=False)
        llm.llm_engine.shutdown()
        return [tokens(output) for output in outputs]

    first, again, other = run(7), run(7), run(8)

    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_parameters_may_be_changed_between_calls_and_are_checked_again(llm: LLM) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    for count in (3, 5):
        params.max_tokens = count
        assert len(only(llm.generate("The sea", params, use_tqdm=False)).token_ids) == count
    params.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        llm.generate("The sea", params, use_tqdm=False)


def test_stop_string_cuts_text_tokens_and_logprobs(llm: LLM) -> None:
    whole = only(llm.generate("The sea", GREEDY, use_tqdm=False))
    stop = whole.text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,), logprobs=0)

    cut = only(llm.generate("The sea", params, use_tqdm=False))

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids)
    assert not llm.llm_engine.has_unfinished_requests()


def test_stop_token_ends_the_output_and_is_part_of_it(llm: LLM) -> None:
    whole = only(llm.generate("The sea", GREEDY, use_tqdm=False))
    stop = whole.token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))

    output = only(llm.generate("The sea", params, use_tqdm=False))

    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_end_token_ends_the_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logit_bias={EOS_TOKEN_ID: 100}, min_tokens=3)

    output = only(llm.generate("The sea", params, use_tqdm=False))

    assert (output.token_ids[-1], len(output.token_ids)) == (EOS_TOKEN_ID, 4)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_logprobs_of_named_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=(200, 7))
    completion = only(llm.generate("The sea", params, use_tqdm=False))
    assert completion.logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert set(entry) == {200, 7, token_id}
        assert all(logprob.logprob <= entry[token_id].logprob for logprob in entry.values())


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)

    (output,) = llm.generate("abc", params, use_tqdm=False)
    completion = output.outputs[0]

    assert completion.logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert (entry[token_id].rank, len(entry)) == (1, 2)
        assert entry[token_id].logprob == max(logprob.logprob for logprob in entry.values())
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token_id].logprob for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token_id, prompt_entry in zip(b"bc", output.prompt_logprobs[1:], strict=True):
        assert prompt_entry is not None
        assert prompt_entry[token_id].decoded_token == chr(token_id)


def test_bad_words_do_not_appear(llm: LLM) -> None:
    whole = only(llm.generate("The sea", GREEDY, use_tqdm=False))
    assert llm.llm_engine.tokenizer is not None
    word = llm.llm_engine.tokenizer.decode_token(next(token for token in whole.token_ids if 33 <= token < 127))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=(word,))

    output = only(llm.generate("The sea", params, use_tqdm=False))

    assert word in whole.text
    assert word not in output.text


def test_repeated_prompt_hits_the_prefix_cache(llm: LLM) -> None:
    prompt = "a prompt that is longer than two blocks of the cache"

    first, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))

    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert tokens(first) == tokens(again)


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)

    assert llm.llm_engine.tokenizer is not None
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == llm.llm_engine.tokenizer.encode(rendered)
    assert [answer.outputs, answer.outputs] == [
        output.outputs for output in llm.chat([messages, messages], GREEDY, use_tqdm=False)
    ]


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ("x" * 128, GREEDY, "maximum context length is 128"),
        ("", GREEDY, "at least one token"),
        ({"prompt_token_ids": [999]}, GREEDY, "outside the model's vocabulary"),
        ({"text": "?"}, GREEDY, "a prompt must be text, token ids, or have prompt .* got {'text': '\\?'}"),
        (5, GREEDY, "a prompt must be text, token ids, or have .* got 5"),
        ([1, "a"], GREEDY, r"a prompt must be text, token ids, or have .* got \[1, 'a'\]"),
        ("x", SamplingParams(logprobs=21), "logprobs must be at most 20"),
        ("x", SamplingParams(stop=("a",), detokenize=False), "stop strings need"),
    ],
)
def test_bad_requests_raise_before_anything_runs(llm: LLM, prompt: Any, params: SamplingParams, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.generate(["fine", prompt], params, use_tqdm=False)

    assert not llm.llm_engine.has_unfinished_requests()


def test_a_limit_of_images_that_is_no_number_raises_value_error(folder: Path) -> None:
    limit: Any = {"image": {"count": 2}}
    with pytest.raises(ValueError, match="limit_mm_per_prompt must have a number of images, got"):
        LLM(str(folder), limit_mm_per_prompt=limit)


def test_unknown_model_raises_value_error() -> None:
    with pytest.raises(ValueError, match="/no/such/folder does not exist"):
        LLM("/no/such/folder")


def test_tokenizer_dtype_and_max_logprobs_can_be_configured(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    llm = LLM(
        str(bare),
        tokenizer=str(tmp_path),
        dtype="half",
        device="cpu",
        max_logprobs=2,
        max_model_len=64,
        kv_cache_memory_bytes=2**20,
    )

    assert only(llm.generate("The sea", GREEDY, use_tqdm=False)).text
    with pytest.raises(ValueError, match="logprobs must be at most 2"):
        llm.generate("The sea", SamplingParams(logprobs=3), use_tqdm=False)


def test_the_whole_vocabulary_may_have_log_probabilities_and_fewer_of_them_are_the_likeliest(folder: Path) -> None:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    for most in (-1, 2**20):
        llm = LLM(str(folder), max_logprobs=most, max_model_len=64, device="cpu", kv_cache_memory_bytes=2**20)
        params = [
            SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=count, prompt_logprobs=count)
            for count in (vocab_size, 3)
        ]
        full, few = (only([output]) for output in llm.generate(["The sea"] * 2, params, use_tqdm=False))
        assert full.logprobs is not None
        assert few.logprobs is not None
        for everything, three in zip(full.logprobs, few.logprobs, strict=True):
            assert everything.keys() == set(range(vocab_size))
            assert math.isclose(sum(math.exp(each.logprob) for each in everything.values()), 1, rel_tol=1e-4)
            assert {token_id for token_id, each in everything.items() if each.rank <= 3} == three.keys()
        with pytest.raises(ValueError, match=f"logprobs must be at most {vocab_size}"):
            llm.generate("The sea", SamplingParams(logprobs=vocab_size + 1), use_tqdm=False)


def test_llm_engine_is_stepped_by_its_caller(folder: Path) -> None:
    engine = LLMEngine(
        EngineConfig(model=str(folder), num_gpu_blocks_override=16, max_model_len=128, skip_tokenizer_init=True)
    )
    engine.add_request("long", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=60, ignore_eos=True))
    engine.add_request("short", {"prompt_token_ids": [3]}, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    with pytest.raises(ValueError, match="belongs to an unfinished request"):
        engine.add_request("short", {"prompt_token_ids": [3]}, GREEDY)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.add_request("text", "text", GREEDY)

    seen: dict[str, list[RequestOutput]] = {"long": [], "short": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
        if seen["short"] and seen["short"][-1].finished:
            engine.abort_request("long")
            seen["short"] = seen["short"][:]
            break
    while engine.has_unfinished_requests():
        assert engine.step() == []
    engine.shutdown()

    lengths = [len(tokens(output)) for output in seen["short"]]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 5
    assert all(
        earlier.outputs[0].token_ids == later.outputs[0].token_ids[: len(earlier.outputs[0].token_ids)]
        for earlier, later in itertools.pairwise(seen["short"])
    )
    assert not seen["long"][-1].finished
    assert seen["short"][-1].outputs[0].text == ""


def test_an_engine_is_no_garbage_until_it_is_shut_down(folder: Path) -> None:
    engine = LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64).llm_engine
    assert gc.get_freeze_count() > 0
    engine.shutdown()
    assert gc.get_freeze_count() == 0
