"""Methods of the offline `LLM` beside those that only generate: chats, queues, sleep, progress."""

import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm.auto import tqdm

from proa_engine import LLM, EngineConfig, SamplingParams
from proa_engine.config import FITTING_LENGTH
from support.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64)


def prompt_of(llm: LLM, messages: Any, **arguments: Any) -> str:
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **arguments)
    return llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(("num_blocks", "longest"), [(3, 48), (64, 512)])
def test_the_context_is_as_long_as_the_cache_has_room_for(num_blocks: int, longest: int, folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", max_model_len=FITTING_LENGTH, num_gpu_blocks_override=num_blocks)
    prompt, params = {"prompt_token_ids": [5] * (longest - 8)}, SamplingParams(temperature=0, ignore_eos=True)
    for _ in range(2):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        llm.sleep(2)
        llm.wake_up()
    with pytest.raises(ValueError, match=f"maximum context length is {longest} tokens"):
        llm.generate([{"prompt_token_ids": [5] * longest}], params, use_tqdm=False)


def test_a_chat_may_continue_the_last_message(llm: LLM) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "The sea is "}]
    prompt = prompt_of(llm, messages, add_generation_prompt=False, continue_final_message=True)

    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe sea is "
    with pytest.raises(ValueError, match="add_generation_prompt and continue_final_message cannot both be true"):
        llm.chat(messages, GREEDY, continue_final_message=True)


def test_a_chat_may_have_no_opening_of_an_answer(llm: LLM) -> None:
    assert prompt_of(llm, [QUESTION], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_chat_may_bring_a_template_and_its_variables(llm: LLM) -> None:
    source = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"

    assert prompt_of(llm, [QUESTION], chat_template=source) == "Hi"
    assert (
        prompt_of(llm, [QUESTION], chat_template=source, chat_template_kwargs={"enable_thinking": True}) == "Hi think"
    )
    with pytest.raises(ValueError, match="chat_template_kwargs must not have tools: it is an argument of its own"):
        llm.chat([QUESTION], chat_template_kwargs={"tools": []})
    with pytest.raises(ValueError, match="does not compile"):
        llm.chat([QUESTION], chat_template="{% if %}")


def test_requests_without_parameters_get_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_k": 7, "eos_token_id": 1}))
    llm = LLM(str(own), dtype="float32", max_model_len=64, num_gpu_blocks_override=32)

    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=7)
    first, again = (llm.generate("The sea", use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    greedy = llm.generate("The sea", SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].token_ids
    assert first == again == greedy


def test_enqueued_requests_are_answered_in_their_order(llm: LLM) -> None:
    prompts = ["The sea", "A boat", "Why?"]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    ids = llm.enqueue(prompts[:2], GREEDY)
    ids += llm.enqueue(prompts[2], GREEDY)
    between = llm.generate("The sea", GREEDY, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)

    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert between[0].outputs[0].token_ids == expected[0]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_an_enqueued_chat_is_answered_as_a_chat(llm: LLM) -> None:
    (expected,) = llm.chat([QUESTION], GREEDY, use_tqdm=False)
    llm.enqueue_chat([QUESTION], GREEDY)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs == expected.outputs


def test_an_enqueued_request_that_is_aborted_has_no_output(llm: LLM) -> None:
    first, second = llm.enqueue(["The sea", "A boat"], GREEDY)
    llm.llm_engine.abort_request(first)
    assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == [second]


def test_the_bar_has_the_speed_of_inputs_and_outputs(llm: LLM) -> None:
    file = io.StringIO()
    llm.generate(["The sea", "A boat"], GREEDY, use_tqdm=partial(tqdm, file=file, mininterval=0))

    last = file.getvalue().strip().rpartition("\r")[2]
    assert "Processed prompts: 100%" in last
    assert "2/2" in last
    assert "est. speed input: " in last
    assert "toks/s, output: " in last
    assert "output: 0.00" not in last


def test_no_bar_is_shown_without_tqdm(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["The sea"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_priorities_need_their_policy(llm: LLM, folder: Path) -> None:
    with pytest.raises(ValueError, match='priority needs an LLM with scheduling_policy="priority"'):
        llm.generate("The sea", GREEDY, priority=[1])
    with pytest.raises(ValueError, match="1 prompts need as many priorities, got 2"):
        llm.generate("The sea", GREEDY, priority=[1, 2])
    ranked = LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=1, scheduling_policy="priority")
    ids = ranked.enqueue(["A", "B", "C"], GREEDY, priority=[2, 1, 0])
    ended: list[str] = []
    while ranked.llm_engine.has_unfinished_requests():
        ended += [output.request_id for output in ranked.llm_engine.step(only_finished=True)]
    assert ended == ids[::-1]


def test_a_model_sleeps_and_wakes_up_with_the_same_tokens(folder: Path) -> None:
    llm = LLM.from_engine_args(EngineConfig(model=str(folder), dtype="float32", max_model_len=64))
    prompt = "a prompt that is longer than two blocks"
    (before,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    for level in (1, 2):
        llm.sleep(level=level)
        with pytest.raises(RuntimeError, match="the engine sleeps: call wake_up first"):
            llm.generate(prompt, GREEDY, use_tqdm=False)
        llm.wake_up()
        (after,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert (after.outputs, after.num_cached_tokens) == (before.outputs, 0)


def test_enqueued_requests_end_before_a_sleep_that_waits_for_them(llm: LLM) -> None:
    llm.enqueue("The sea", GREEDY)
    llm.sleep(mode="wait")
    llm.wake_up()
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_enqueued_requests_are_aborted_by_a_sleep(llm: LLM) -> None:
    llm.enqueue("The sea", GREEDY)
    llm.sleep()
    llm.wake_up()
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"


def test_ways_to_sleep_that_are_not_there_are_refused(llm: LLM) -> None:
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"level": 0}, "level must be 1 or 2, got 0"),
        ({"mode": "keep"}, "mode must be abort or wait, got 'keep'"),
    ]
    for values, sentence in arguments:
        with pytest.raises(ValueError, match=sentence):
            llm.sleep(**values)
    with pytest.raises(ValueError, match="tags must be None, got"):
        llm.wake_up(tags=["weights"])


def test_the_prefix_cache_can_be_emptied(llm: LLM) -> None:
    prompt = "a prompt that is longer than two blocks of the cache"
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_the_number_of_ranks_and_the_tokenizer_can_be_asked_for(llm: LLM, folder: Path) -> None:
    assert llm.get_world_size() == 1
    assert llm.get_tokenizer().encode("Hi") == list(b"Hi")
    bare = LLM(str(folder), skip_tokenizer_init=True, max_model_len=32, kv_cache_memory_bytes=2**20)
    with pytest.raises(ValueError, match="loaded with skip_tokenizer_init"):
        bare.get_tokenizer()
