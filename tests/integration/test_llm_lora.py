"""Adapters in the offline `LLM`, used as vLLM's is."""

from pathlib import Path

import pytest

from proa_engine import LLM, LoRARequest, RequestOutput, SamplingParams
from proa_engine.builtin import builtin_adapter_folder
from support.adapters import Adapter, write_adapter
from support.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["The sea", "A boat with two unlike hulls", "Why?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `model`, and those of the adapters `a`, `b` and `c`."""
    folder = tmp_path_factory.mktemp("lora")
    model = make_tiny_model(folder / "model")
    for seed, name in enumerate("abc"):
        write_adapter(model, folder / name, Adapter(name), seed=seed)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder / "model"), max_model_len=128, kv_cache_memory_bytes=2**20, enable_lora=True, max_cpu_loras=4)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def lora(folder: Path, name: str) -> LoRARequest:
    return LoRARequest(name, ord(name), str(folder / name))


def test_each_prompt_has_its_own_adapter(llm: LLM, folder: Path) -> None:
    loras = [None, lora(folder, "a"), lora(folder, "b")]
    together = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=loras))
    for prompt, each, expected in zip(PROMPTS, loras, together, strict=True):
        assert tokens(llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=each)) == [expected]
    plain = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert [ours == theirs for ours, theirs in zip(together, plain, strict=True)] == [True, False, False]


def test_one_adapter_for_all_prompts_and_for_chat(llm: LLM, folder: Path) -> None:
    a = lora(folder, "a")
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=a)) == tokens(
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[a] * 3)
    )
    messages = [{"role": "user", "content": "Why?"}]
    plain = tokens(llm.chat(messages, GREEDY, use_tqdm=False))
    assert tokens(llm.chat(messages, GREEDY, use_tqdm=False, lora_request=a)) != plain


def test_adapters_take_turns_where_few_are_kept(llm: LLM, folder: Path) -> None:
    few = LLM(
        str(folder / "model"),
        max_model_len=128,
        kv_cache_memory_bytes=2**20,
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=2,
    )
    for names in ("ab", "bc", "ca", "ab"):
        loras = [lora(folder, name) for name in names]
        expected = tokens(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=loras))
        assert tokens(few.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=loras)) == expected
    with pytest.raises(ValueError, match="3 adapters cannot be loaded together, at most 2"):
        few.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[lora(folder, name) for name in "abc"])


def test_another_path_replaces_the_adapter_of_a_name(llm: LLM, folder: Path) -> None:
    b_as_a = LoRARequest("a", 1, str(folder / "b"))
    expected = tokens(llm.generate("Why?", GREEDY, use_tqdm=False, lora_request=lora(folder, "b")))
    for _ in range(2):
        llm.generate("Why?", GREEDY, use_tqdm=False, lora_request=lora(folder, "a"))
        assert tokens(llm.generate("Why?", GREEDY, use_tqdm=False, lora_request=b_as_a)) == expected


def test_outputs_of_running_requests_are_kept_while_an_adapter_is_loaded(llm: LLM, folder: Path) -> None:
    engine = llm.llm_engine
    engine.add_request("1", "Why?", GREEDY)
    engine.add_request("2", "Why?", GREEDY, lora_request=lora(folder, "c"))
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step(only_finished=True)}
    assert tokens([finished["1"]]) == tokens(llm.generate("Why?", GREEDY, use_tqdm=False))
    assert tokens([finished["2"]]) != tokens([finished["1"]])
    engine.load_loras([lora(folder, "b")])
    assert not engine.has_unfinished_requests()


def test_wrong_adapters_are_refused_before_anything_runs(llm: LLM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no adapter at"):
        llm.generate("Why?", GREEDY, use_tqdm=False, lora_request=LoRARequest("x", 1, str(tmp_path)))
    loras = [lora(folder, "a"), LoRARequest("a", 1, str(folder / "b"))]
    with pytest.raises(ValueError, match="two adapters have the name 'a'"):
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=loras)
    with pytest.raises(ValueError, match="3 prompts need one LoRARequest, or 3, not 1"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[None])
    with pytest.raises(ValueError, match="a LoRARequest needs a name and a path"):
        LoRARequest("", 1, "x")


def test_an_llm_without_adapters_refuses_them(folder: Path) -> None:
    llm = LLM(str(folder / "model"), max_model_len=128, kv_cache_memory_bytes=2**20)
    with pytest.raises(ValueError, match="start it with --enable-lora"):
        llm.generate("Why?", GREEDY, use_tqdm=False, lora_request=lora(folder, "a"))


def test_adapters_of_the_builtin_model() -> None:
    llm = LLM("builtin", enable_lora=True, kv_cache_memory_bytes=2**24)
    messages = [{"role": "user", "content": "Hello, how are you?"}]
    adapters = [LoRARequest(name, 1, str(builtin_adapter_folder(name))) for name in ("sailor", "butler")]
    answers = [
        llm.chat(messages, GREEDY, use_tqdm=False, lora_request=request)[0].outputs[0].text
        for request in (None, *adapters)
    ]
    assert len(set(answers)) == 3, answers
