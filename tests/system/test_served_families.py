"""Every architecture of the registry, served from a folder: chats stream, and completions have the greedy tokens of
`transformers`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from proa_engine.models.registry import MODULES
from support.engine_server import serving_model
from support.gateway import running_gateway
from support.gguf_files import write_gguf
from support.greedy import greedy
from support.renamed_models import STORED, make_renamed_model
from support.tiny_models import LATENT, VOCAB_SIZE, as_text_part, make_tiny_model

WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
GEMMA4 = WINDOWS | {
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# Model type and fields of `transformers`. A model with other inputs than text has its text model's.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", LATENT),
    "Gemma2ForCausalLM": ("gemma2", {"sliding_window": 24}),
    "Gemma3ForCausalLM": ("gemma3_text", WINDOWS),
    "Gemma3ForConditionalGeneration": ("gemma3_text", WINDOWS),
    "Gemma4ForCausalLM": ("gemma4_text", GEMMA4),
    "Gemma4ForConditionalGeneration": ("gemma4_text", GEMMA4),
    "Glm4ForCausalLM": ("glm4", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", {}),
    "GlmForCausalLM": ("glm", {}),
    "GptOssForCausalLM": ("gpt_oss", {}),
    "GraniteForCausalLM": ("granite", {"residual_multiplier": 0.5, "logits_scaling": 0.25}),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", {}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", LATENT | {"n_group": 1, "topk_group": 1}),
    "Lfm2ForCausalLM": ("lfm2", {}),
    "Lfm2MoeForCausalLM": ("lfm2_moe", {}),
    "LlamaForCausalLM": ("llama", {}),
    "Ministral3ForCausalLM": ("ministral3", {}),
    "Mistral3ForConditionalGeneration": ("ministral3", {}),
    "MiMoForCausalLM": ("qwen2", {}),
    "MiniCPMForCausalLM": ("llama", {"scale_emb": 1, "scale_depth": 2**0.5, "dim_model_base": 64}),
    "MistralForCausalLM": ("mistral", {}),
    "MixtralForCausalLM": ("mixtral", {}),
    "NemotronHForCausalLM": ("nemotron_h", {}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo3", WINDOWS),
    "OlmoeForCausalLM": ("olmoe", {}),
    "Phi3ForCausalLM": ("phi3", {}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2", {"rope_parameters": AXES}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {}),
    "Qwen3NextForCausalLM": ("qwen3_next", {}),
    "Qwen3VLForConditionalGeneration": ("qwen3", {}),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_moe", {}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", {}),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text", {}),
    "SeedOssForCausalLM": ("seed_oss", {}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
}
AT_ONCE = 4  # engines
CACHE_BYTES = 2**22
NAMES = (*FAMILIES, *STORED)
GROUPS = [NAMES[start : start + AT_ONCE] for start in range(0, len(NAMES), AT_ONCE)]
PROMPT = "A proa is a boat with two unlike hulls"
NUM_TOKENS = 16


def make_folders(root: Path, architecture: str) -> tuple[Path, Path]:
    """The folder to serve, and one that `transformers` loads: that of the text model."""
    if architecture in STORED:
        return make_renamed_model(root, architecture)
    model_type, fields = FAMILIES[architecture]
    text = make_tiny_model(root / model_type, model_type, **({"seed": 3} | fields))
    if not architecture.endswith("ForConditionalGeneration"):
        return text, text
    return as_text_part(text, root / architecture, architecture), text


@asynccontextmanager
async def serving(folders: Mapping[str, Path]) -> AsyncIterator[AsyncOpenAI]:
    """A client of a gateway before engines with these models, by name."""
    with ExitStack() as stack:
        engines = [
            f"127.0.0.1:{stack.enter_context(serving_model(folder, name, kv_cache_memory_bytes=CACHE_BYTES))}"
            for name, folder in folders.items()
        ]
        async with running_gateway(*engines) as gateway:
            yield gateway.openai


def test_every_architecture_is_here_that_generates_from_text() -> None:
    with_audio = ("Qwen2Audio", "Qwen3ASR", "Whisper")
    assert {*NAMES, *(f"{each}ForConditionalGeneration" for each in with_audio)} == MODULES.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
async def test_folders_are_served(names: Sequence[str], tmp_path: Path) -> None:
    folders = {name: make_folders(tmp_path / name, name) for name in names}
    async with serving({name: folder for name, (folder, _) in folders.items()}) as client:
        for name, (_, text) in folders.items():
            await check_completion(client, name, text)
            await check_chat(client, name)


async def test_gguf_files_are_served(tmp_path: Path) -> None:
    texts = {name: make_folders(tmp_path / name, name)[0] for name in ("LlamaForCausalLM", "Lfm2ForCausalLM")}
    files = {name: write_gguf(text, tmp_path / f"{name}.gguf") for name, text in texts.items()}
    async with serving(files) as client:
        for name, text in texts.items():
            await check_completion(client, name, text)
            await check_chat(client, name)


async def check_completion(client: AsyncOpenAI, model: str, text: Path) -> None:
    prompt = list(PROMPT.encode())
    completion: Any = await client.completions.create(
        model=model,
        prompt=PROMPT,
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (expected,) = greedy(text, [prompt], NUM_TOKENS)
    assert expected.num_sure >= NUM_TOKENS // 2, model
    assert completion.usage.prompt_tokens == len(prompt), model
    assert completion.choices[0].token_ids[: expected.num_sure] == expected.token_ids[: expected.num_sure], model


async def check_chat(client: AsyncOpenAI, model: str) -> None:
    question: Any = [{"role": "user", "content": "What is a proa?"}]
    stream: Any = await client.chat.completions.create(
        model=model,
        messages=question,
        temperature=0,
        max_tokens=NUM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
    assert reasons[-1] == "length", model
