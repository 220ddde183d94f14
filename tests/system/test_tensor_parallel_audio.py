"""Two ranks that share the audios of a step generate the tokens of `transformers`, and align texts as it does."""

from pathlib import Path
from typing import Any

from proa.contract import SamplingParams
from support.audio_prompt_models import greedy_with_audio, make_qwen2_audio, run_with_audio, split
from support.engine import build_core, run
from support.greedy import check_tokens
from support.whisper_models import (
    PROMPT,
    TOKENS,
    aligned,
    check_alignment,
    greedy_transcriptions,
    make_whisper,
    tone,
    transcription,
)

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
A, B, SHORT = tone(1), tone(2, 0.77), tone(3, 0.05)
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "block_size": 4, "async_scheduling": True}


def test_transcriptions_and_alignments_of_two_ranks_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_whisper(tmp_path / "whisper")
    with_text = [TOKENS["startofprev"], *range(20, 50), *PROMPT]
    cases = [(A, PROMPT), (B, with_text), (A, with_text), (SHORT, PROMPT), (B, with_text)] * 2
    alignments = [(samples, aligned(str(len(samples)), samples, [*PROMPT, *range(60, 80)])) for samples in (B, SHORT)]
    # Chunked prefill with an audio in each step, and preemption: an audio has 13 blocks.
    with build_core(folder, max_num_batched_tokens=9, num_gpu_blocks_override=50, **TWO_RANKS) as engine:
        requests = [transcription(str(index), samples, PARAMS, prompt) for index, (samples, prompt) in enumerate(cases)]
        results = run(engine, [*requests, *(request for _, request in alignments)])
        assert engine.core.stats().num_preemptions > 0
    tokens = [results[str(index)].token_ids for index in range(len(cases))]
    check_tokens(tokens, greedy_transcriptions(folder, cases, NUM_TOKENS))
    for samples, request in alignments:  # of the three heads, the second rank has one
        check_alignment(folder, samples, request, results[request.request_id])


def test_tokens_behind_audio_of_two_ranks_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_qwen2_audio(tmp_path / "qwen2_audio")
    stem = list(range(40, 49))
    prompts = [[*range(20)], [*stem, A, 5], [*stem, A, 7, B, 5], [SHORT, 3, SHORT, 1], [*stem, A, 7, B, 5]]
    settings = TWO_RANKS | {"max_model_len": 100, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 30}
    with build_core(folder, **settings) as engine:
        tokens = run_with_audio(engine, prompts, PARAMS)
        assert engine.core.counters().audios.num_encoded >= 3
    check_tokens(tokens, greedy_with_audio(folder, [split(each) for each in prompts], NUM_TOKENS))
