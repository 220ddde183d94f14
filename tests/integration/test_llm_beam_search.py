"""Beam search of the offline `LLM`: the tokens of transformers, and vLLM's results where its rules differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from proa_engine import LLM, BeamSearchParams, SamplingParams
from proa_engine.offline.beam_search import BeamSearchSequence
from support.beams import Found, search
from support.tiny_models import EOS_TOKEN_ID, make_tiny_model

PROMPTS = ["The sea", "A boat with two unlike hulls, longer than a block", "Why?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=128)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def outputs(sequences: Sequence[BeamSearchSequence], prompt: str) -> list[list[int]]:
    return [sequence.tokens[len(prompt.encode()) :] for sequence in sequences]


@pytest.mark.parametrize(("width", "num_tokens"), [(1, 6), (2, 12), (5, 9)])
def test_tokens_and_order_are_those_of_transformers(llm: LLM, reference: Any, width: int, num_tokens: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    for prompt, found in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = torch.tensor([list(prompt.encode())])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=-1,  # no token ends an output
            pad_token_id=0,
        )
        assert outputs(found.sequences, prompt) == expected[:, ids.shape[1] :].tolist()


class Endings:
    """The likeliest next tokens by transformers, where ends of sequences are as likely as the model finds them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def next_logprobs(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)])).logits[0, -1]
        found = torch.log_softmax(logits, dim=-1).topk(16)
        return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_ends_of_sequences_and_length_penalty_count_as_in_vllm(tmp_path: Path, length_penalty: float) -> None:
    folder = make_tiny_model(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    likely = Endings(model).next_logprobs(list(b"The sea"))[1][0]
    llm = LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64)
    llm.llm_engine.eos_token_ids = frozenset({EOS_TOKEN_ID, likely})  # one that beams meet

    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=length_penalty)
    (found,) = llm.beam_search(["The sea"], params)
    expected = search(params, list(b"The sea"), Endings(model).next_logprobs, {EOS_TOKEN_ID, likely})

    assert outputs(found.sequences, "The sea") == [list(each.tokens) for each in expected]
    assert [each.cum_logprob for each in found.sequences] == pytest.approx(
        [each.cumulative_logprob for each in expected], rel=1e-3
    )
    ended = [each for each in found.sequences if each.finish_reason == "stop"]
    assert ended
    assert all(each.stop_reason == each.tokens[-1] for each in ended)
    assert isinstance(expected[0], Found)


def test_a_sequence_has_vllms_fields(llm: LLM) -> None:
    (found,) = llm.beam_search("The sea", BeamSearchParams(2, 4, ignore_eos=True))
    first, second = found.sequences

    assert first.cum_logprob >= second.cum_logprob
    assert first.text == llm.get_tokenizer().decode(first.tokens, skip_special_tokens=False)
    assert (first.orig_prompt, first.finish_reason, first.stop_reason) == ("The sea", "length", None)
    assert [len(entry) for entry in first.logprobs] == [4] * 4
    chosen = [entry[token_id].logprob for entry, token_id in zip(first.logprobs, first.tokens[-4:], strict=True)]
    assert sum(chosen) == pytest.approx(first.cum_logprob)


def test_the_result_does_not_depend_on_how_many_prompts_are_searched_at_a_time(llm: LLM) -> None:
    params = BeamSearchParams(2, 6, ignore_eos=True)
    together = llm.beam_search(PROMPTS, params)
    apart = llm.beam_search(PROMPTS, params, concurrency_limit=1)

    assert [[each.tokens for each in found.sequences] for found in together] == [
        [each.tokens for each in found.sequences] for found in apart
    ]


def test_one_beam_is_greedy_if_no_token_ends_it(llm: LLM) -> None:
    (found,) = llm.beam_search("The sea", BeamSearchParams(1, 8, ignore_eos=True))
    (greedy,) = llm.generate("The sea", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)

    assert outputs(found.sequences, "The sea") == [greedy.outputs[0].token_ids]


def test_outputs_end_with_the_context(llm: LLM) -> None:
    prompt = "x" * 125
    (found,) = llm.beam_search(prompt, BeamSearchParams(2, 50, ignore_eos=True))
    assert [len(each.tokens) for each in found.sequences] == [128, 128]


@pytest.mark.parametrize(
    ("prompt", "width", "sentence"),
    [
        ("fine", 11, r"beam_width must be at most 10, half of max_logprobs \(20\), got 11"),
        ("x" * 128, 2, "maximum context length is 128"),
        ({"text": "?"}, 2, "a prompt must be text, token ids"),
    ],
)
def test_bad_searches_raise(llm: LLM, prompt: Any, width: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.beam_search(["fine", prompt], BeamSearchParams(width, 2))
