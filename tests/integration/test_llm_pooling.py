"""The offline `LLM` with pooled requests, used as vLLM's is."""

from pathlib import Path

import pytest
import torch

from proa_engine import LLM, PoolingParams, PoolingTask, SamplingParams
from support.pooling_models import make_embedding_model
from support.tiny_models import make_tiny_model

PROMPTS = ["The sea", "A boat with two unlike hulls", "Why?"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_embedding_model(tmp_path_factory.mktemp("tiny"), "mean_tokens", normalize=True)
    return load(folder)


def load(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64, max_num_batched_tokens=128)


def test_embeddings_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [list(prompt.encode()) for prompt in PROMPTS]
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        (alone,) = llm.embed(prompt, use_tqdm=False)
        assert output.outputs.hidden_size == 64
        assert output.outputs.embedding == pytest.approx(alone.outputs.embedding, abs=1e-5)


def test_an_embedding_has_its_bits_whatever_is_beside_it(tmp_path: Path) -> None:
    llm = load(make_embedding_model(tmp_path, "mean_tokens", dense=(128,), normalize=True))
    for output, prompt in zip(llm.embed(PROMPTS, use_tqdm=False), PROMPTS, strict=True):
        (alone,) = llm.embed(prompt, use_tqdm=False)
        assert output.outputs.embedding == alone.outputs.embedding


def test_encode_returns_tensors(llm: LLM) -> None:
    (output,) = llm.encode("The sea", pooling_task="token_embed", use_tqdm=False)
    assert output.outputs.data.shape == (7, 64)
    params = PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(1, 2, 3))
    (output,) = llm.encode("The sea", params, use_tqdm=False)
    assert output.outputs.data.shape == (3,)


def test_the_score_of_two_texts_is_the_cosine_of_their_embeddings(llm: LLM) -> None:
    vectors = torch.tensor([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
    scores = llm.score(PROMPTS[0], PROMPTS[1:], use_tqdm=False)
    assert [score.outputs.score for score in scores] == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


def test_an_unfinished_request_goes_on_after_pooled_ones(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("beside", "The sea", SamplingParams(max_tokens=3, ignore_eos=True))
    llm.embed(PROMPTS, use_tqdm=False)
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step(only_finished=True)
    assert [len(output.outputs[0].token_ids) for output in finished] == [3]


def test_what_the_model_cannot_do_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="does not support the pooling task CLASSIFY"):
        llm.classify(PROMPTS, use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_task must be one of"):
        llm.encode(PROMPTS, pooling_task="reward", use_tqdm=False)
    with pytest.raises(ValueError, match="score needs one text and others"):
        llm.score(PROMPTS[:2], PROMPTS, use_tqdm=False)


@torch.inference_mode()
def test_the_score_of_a_cross_encoder_is_the_probability_of_its_label(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    make_tiny_model(
        tmp_path,
        "bert",
        auto_class="AutoModelForSequenceClassification",
        num_labels=1,
        pad_token_id=0,
        type_vocab_size=2,
    )
    scores = load(tmp_path).score(PROMPTS[0], PROMPTS[1:], use_tqdm=False)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for score, text in zip(scores, PROMPTS[1:], strict=True):
        ids = torch.tensor([[*PROMPTS[0].encode(), *text.encode()]])
        types = (torch.arange(ids.shape[1]) >= len(PROMPTS[0])).long()[None]
        logits = model(ids, token_type_ids=types, attention_mask=torch.ones_like(ids)).logits
        assert score.prompt_token_ids == ids[0].tolist()
        assert score.outputs.score == pytest.approx(logits.sigmoid().item(), abs=1e-4)


def test_a_classifier_gives_probabilities_and_generates_nothing(tmp_path: Path) -> None:
    llm = load(make_tiny_model(tmp_path, auto_class="AutoModelForSequenceClassification", num_labels=3))
    (output,) = llm.classify("The sea", use_tqdm=False)
    assert output.outputs.num_classes == 3
    assert sum(output.outputs.probs) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="generates no tokens"):
        llm.generate("The sea", use_tqdm=False)
