"""The first tests to run on a new machine: each kernel once at the shapes of a real model, a captured chain of
dependent launches, and an engine as it is served.

Without a GPU they run in Triton's interpreter at small shapes (`TRITON_INTERPRET=1`), to check the tests themselves.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine import LLM, SamplingParams
from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.kernels.silu_and_mul import activate_and_mul_reference, silu_and_mul
from proa_engine.preflight.devices import read_gpus
from support.interpreter import patch_language
from support.kernels import attention, caches, experts, norms, products, quantized, routers
from support.kernels.case import Case, cases_of, close
from support.launch_chain import check_captured_chain
from support.shape_models import make_shape_model

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile_pool,
    pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="no GPU"),
]
on_gpu_only = pytest.mark.skipif(not HAS_GPU, reason="no GPU")


@pytest.fixture(scope="module", autouse=True)
def _language() -> None:
    if INTERPRETED:
        patch_language()


@dataclass(frozen=True)
class Sizes:
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    experts: int = 128
    expert_inner: int = 768
    prompt: int = 1024
    context: int = 700
    batch: int = 64


SIZES = Sizes() if HAS_GPU else Sizes(torch.float16, 256, 128, 4, 2, 16, 8, 128, 20, 40, 3)
HEADS = {"num_heads": SIZES.heads, "num_kv_heads": SIZES.kv_heads, "head_dim": SIZES.head_dim}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024 if HAS_GPU else 64,
    "intermediate_size": 3072 if HAS_GPU else 96,
    "num_attention_heads": 16 if HAS_GPU else 4,
    "num_key_value_heads": 8 if HAS_GPU else 2,
    "head_dim": 128 if HAS_GPU else 16,
    "vocab_size": 151936 if HAS_GPU else 300,
    "num_hidden_layers": 28 if HAS_GPU else 2,
    "max_position_embeddings": 40960 if HAS_GPU else 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def check(case: Case, **shape: Any) -> None:
    case.check(SIZES.dtype, DEVICE, shape)


def test_the_device_and_the_libraries_compute() -> None:
    x = torch.ones(256, 256, device=DEVICE).to(SIZES.dtype)
    assert (x @ x == 256).all()
    close(silu_and_mul(x), activate_and_mul_reference(x.cpu(), "silu"))


def test_norm_and_silu() -> None:
    check(norms.ADD_RMS_NORM, rows=SIZES.batch, size=SIZES.hidden)
    check(norms.ACTIVATE_AND_MUL, rows=SIZES.batch, size=SIZES.inner, factor=1, activation="silu")


def test_rotation_and_cache() -> None:
    check(caches.ROTATE_AND_CACHE, tokens=SIZES.batch, **HEADS)


@pytest.mark.parametrize("kind", ["decodes", "prompts", "both"])
def test_attention(kind: str) -> None:
    decodes = [(1, SIZES.context + 3 * index) for index in range(SIZES.batch)] if kind != "prompts" else []
    prompts = [(SIZES.prompt, SIZES.prompt), (9, SIZES.context)] if kind != "decodes" else []
    check(attention.ATTENTION, lens=(*decodes, *prompts), sizes=HEADS, scale=SIZES.head_dim**-0.5)


def test_products_of_few_rows() -> None:
    check(products.skinny_products, outputs=SIZES.hidden, inputs=SIZES.hidden, num_rows=2)


def test_products_of_few_rows_of_8_bits() -> None:
    outputs, inputs = (SIZES.hidden, SIZES.hidden) if HAS_GPU else (4, 128)  # fewer programs for the interpreter
    check(products.skinny_products_of_8_bits, outputs=outputs, inputs=inputs)


def test_products_of_8_and_4_bits_and_batch_invariant_ones() -> None:
    square = {"outputs": SIZES.hidden, "inputs": SIZES.hidden}
    for form in ("rows", "groups") if HAS_GPU else ("groups",):
        check(norms.QUANTIZE, rows=max(4, SIZES.batch), size=SIZES.hidden, form=form)
        check(quantized.PRODUCTS_OF_8_BITS, rows=SIZES.batch, form=form, has_bias=False, **square)
    for bits in (4, 8):
        check(quantized.PRODUCTS_BY_INTEGERS, rows=SIZES.batch, group_size=128, bits=bits, **square)
    check(products.invariant_products, **square)


def test_experts() -> None:
    check(routers.routes, experts=SIZES.experts, how=Routing(4, normalize=True), tokens=SIZES.batch)
    router = {"experts": SIZES.experts, "inputs": SIZES.hidden // 2, "is_first": False, "has_bias": False}
    check(routers.norms_and_routes, rows=SIZES.batch, how=Routing(4, normalize=True), **router)
    sizes = {"hidden": SIZES.hidden // 2, "inner": SIZES.expert_inner, "experts": SIZES.experts, "k": 4}
    for tokens in (1, SIZES.batch):
        check(experts.EXPERTS_OF_FLOATS, form="float", tokens=tokens, **sizes)


@pytest.mark.parametrize("name", [name for name, case in cases_of("sampling").items() if case.interpreted])
def test_inputs_samples_and_drafts(name: str) -> None:
    case = cases_of("sampling")[name]
    check(case, **case.interpreted[0])


@on_gpu_only
def test_gpus_of_the_driver_are_those_of_torch() -> None:
    gpus = read_gpus()
    assert gpus is not None
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    assert len(gpus.memory) == len(properties)
    assert max(gpus.memory) == pytest.approx(max(each.total_memory for each in properties), rel=0.05)


@on_gpu_only
def test_a_captured_chain_equals_its_kernels_launched_one_by_one() -> None:
    check_captured_chain(SIZES.hidden, SIZES.inner, num_layers=4, num_replays=50)


@pytest.mark.timeout(100)
def test_an_engine_as_it_is_served_generates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the default memory budget, graphs of all sizes, and its kernels compiled by other processes."""
    caplog.set_level(logging.INFO)
    memory: dict[str, Any] = {} if HAS_GPU else {"num_gpu_blocks_override": 64}
    llm = LLM(
        str(make_shape_model(tmp_path, MODEL)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=16384 if HAS_GPU else 128,
        **memory,
    )
    params = SamplingParams(temperature=0.6, max_tokens=20, ignore_eos=True, detokenize=False)
    for count in (1, SIZES.batch):
        prompts = [{"prompt_token_ids": [2 + index] * 30} for index in range(count)]
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert all(len(token_ids) == 20 for token_ids in outputs)
        assert all(0 <= token < MODEL["vocab_size"] for token_ids in outputs for token in token_ids)
    assert "precompilation failed" not in caplog.text
    assert "was compiled after the warm-up" not in caplog.text
