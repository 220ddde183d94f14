"""Tiny models with images: random weights, a byte-level tokenizer with the family's special tokens, a chat template.

And their greedy tokens by `transformers` for chats with images, which Pillow resizes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from support.greedy import MARGIN, Expected
from support.tiny_models import EOS_TOKEN_ID, MIXTURES, VOCAB_SIZE, write_tokenizer

QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
MISTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
GEMMA4_TOKENS = ("<|image>", "<image|>", "<|image|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_MIXTURES = {"qwen3_vl_moe": "qwen3_moe", "qwen3_5_moe": "qwen3_5_moe_text"}  # whose experts they have
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "initializer_range": 0.1,
}


_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.1,
}


def make_image_model(
    folder: Path, model_type: str, seed: int = 0, *, patch: int = 8, side: int = 128, **overrides: Any
) -> Path:
    """Write a model of `qwen2_5_vl`, `qwen3_vl`, `qwen3_5`, a mixture of experts of the last two (`…_moe`), `gemma3`,
    `gemma4` or `mistral3` to `folder`; returns it. `patch` is in pixels. All but Gemma's read images of at most `side`
    * `side` pixels. `overrides` are fields of `text_config`."""
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    fields = _fields(model_type, patch)
    fields["text_config"] |= overrides
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():  # what starts as constants, make it matter
            if parameter.dim() == 1 or name.endswith("mm_input_projection_weight"):
                parameter.data += 0.1 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):  # limits of products
                buffer.fill_(-1.5 if name.endswith("_min") else 1.5)
            elif "vision_tower.std_" in name:
                buffer.copy_(torch.randn(buffer.shape))
    model.generation_config = GenerationConfig(eos_token_id=[EOS_TOKEN_ID])
    model.save_pretrained(folder)
    if model_type == "qwen3_vl_moe":
        _store_experts_as_released(folder / "model.safetensors")
    _write_tokenizer(folder, model_type)
    _image_processor(model_type, patch, side).save_pretrained(folder)
    return folder


def _store_experts_as_released(path: Path) -> None:
    """With inputs before outputs. The library reads both and writes what it read, or what it has itself."""
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


def chat_tokens(folder: Path, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image]) -> list[int]:
    """The prompt of a conversation with `{"type": "image"}` parts, as the library's processor writes it."""
    return _inputs(folder, messages, images)["input_ids"][0].tolist()


@torch.inference_mode()
def greedy_chat(
    folder: Path, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image], num_tokens: int
) -> Expected:
    """By `transformers` in float32, beyond end tokens."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    inputs = _inputs(folder, messages, images)
    output = model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=VOCAB_SIZE * 2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    best = [logits[0].topk(2).values for logits in output.logits]
    unsure = (step for step, (first, second) in enumerate(best) if float(first - second) < MARGIN)
    return Expected(tokens, next(unsure, num_tokens))


def _inputs(folder: Path, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    model_type, patch = config["model_type"], config["vision_config"]["patch_size"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    added = _tokens(model_type)
    features: dict[str, torch.Tensor] = {}
    if images:
        found = _processor_class(model_type).from_pretrained(folder)(
            list(images), return_tensors="pt", **({"patch_size": 2 * patch} if model_type == "mistral3" else {})
        )
        kept = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
        features = {name: torch.as_tensor(found[name]) for name in kept if name in found}
    if model_type == "gemma3":
        placeholder, token, types = added[0], added[2], "token_type_ids"
        expanded = [f"\n\n{added[0]}{added[2] * 16}{added[1]}\n\n"] * len(images)
    elif model_type == "gemma4":
        placeholder, token, types = added[2], added[2], "mm_token_type_ids"
        counts = [int((each[:, 0] >= 0).sum()) // 4 for each in features.get("image_position_ids", ())]
        expanded = [added[0] + token * count + added[1] for count in counts]
    elif model_type == "mistral3":
        placeholder, token, types = added[0], added[0], ""
        sizes = [(size // (2 * patch)).tolist() for size in features.get("image_sizes", ())]
        expanded = [added[1].join([added[0] * columns] * rows) + added[2] for rows, columns in sizes]
    else:
        placeholder, token, types = added[2], added[2], "mm_token_type_ids"
        expanded = [token * (int(grid.prod()) // 4) for grid in features.get("image_grid_thw", ())]
    first, *others = text.split(placeholder)
    text = first + "".join(image + other for image, other in zip(expanded, others, strict=True))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    token_id: Any = tokenizer.convert_tokens_to_ids(token)
    return {"input_ids": ids, **({types: ids.eq(token_id).long()} if types else {}), **features}


def _tokens(model_type: str) -> tuple[str, ...]:
    others = {"gemma3": GEMMA_TOKENS, "gemma4": GEMMA4_TOKENS, "mistral3": MISTRAL_TOKENS}
    return others.get(model_type, QWEN_TOKENS)


def _fields(model_type: str, patch: int) -> dict[str, Any]:
    if model_type == "gemma3":
        siglip = _ENCODER | {"image_size": 8 * patch, "patch_size": patch}
        text = _TEXT | {"vocab_size": VOCAB_SIZE + 3, "sliding_window": 24, "query_pre_attn_scalar": 16}
        text |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        ids = {"boi_token_index": VOCAB_SIZE, "eoi_token_index": VOCAB_SIZE + 1, "image_token_index": VOCAB_SIZE + 2}
        return {
            "text_config": text,
            "vision_config": siglip,
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        } | ids
    if model_type == "gemma4":
        sizes = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": patch, "pooling_kernel_size": 2}
        clipped = _ENCODER | sizes | {"position_embedding_size": 160, "use_clipped_linears": True, "standardize": True}
        text = _TEXT | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        text |= {"sliding_window": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "pad_token_id": 3}
        text |= {"vocab_size": VOCAB_SIZE + 3, "vocab_size_per_layer_input": VOCAB_SIZE + 3}
        text |= {"use_bidirectional_attention": "vision"}
        ids = {"boi_token_id": VOCAB_SIZE, "eoi_token_id": VOCAB_SIZE + 1, "image_token_id": VOCAB_SIZE + 2}
        return {"text_config": text, "vision_config": clipped, "tie_word_embeddings": False} | ids
    if model_type == "mistral3":
        pixtral = _ENCODER | {"model_type": "pixtral", "patch_size": patch}
        text = _TEXT | {"model_type": "ministral3", "vocab_size": VOCAB_SIZE + len(MISTRAL_TOKENS)}
        ids = {"image_token_index": VOCAB_SIZE, "spatial_merge_size": 2}
        return {"text_config": text, "vision_config": pixtral, "tie_word_embeddings": False} | ids
    text = _TEXT | MIXTURES.get(_MIXTURES.get(model_type, ""), {}) | {"vocab_size": VOCAB_SIZE + len(QWEN_TOKENS)}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": model_type != "qwen2_5_vl"}
    vision: dict[str, Any] = _VISION | {"patch_size": patch}
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        text |= {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": rope | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        }
    elif model_type == "qwen2_5_vl":
        text |= {"rope_parameters": rope | {"mrope_section": [2, 3, 3]}}
        del vision["num_position_embeddings"]
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    else:
        text |= {"rope_parameters": rope | {"mrope_section": [4, 2, 2]}}
        vision |= {"deepstack_visual_indexes": [0, 2]}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: VOCAB_SIZE + index for index, name in enumerate(names)}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False} | ids


def _write_tokenizer(folder: Path, model_type: str) -> None:
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(_tokens(model_type)))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"gemma3": "<start_of_image>", "gemma4": "<|image|>", "mistral3": "[IMG]"}
    image = names.get(model_type, "<|vision_start|><|image_pad|><|vision_end|>")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE.replace("IMAGE", image)}))


def _image_processor(model_type: str, patch: int, side: int) -> Any:
    if model_type == "gemma3":
        size = {"height": 8 * patch, "width": 8 * patch}
        return _processor_class(model_type)(size=size, image_seq_length=16)
    if model_type == "gemma4":
        return _processor_class(model_type)(patch_size=patch, pooling_kernel_size=2, max_soft_tokens=70)
    if model_type == "mistral3":
        size = {"longest_edge": side}
        return _processor_class(model_type)(size=size, patch_size={"height": patch, "width": patch})
    mean = [0.5, 0.5, 0.5]
    return _processor_class(model_type)(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": (4 * patch) ** 2, "longest_edge": side**2},
        image_mean=mean,
        image_std=mean,
    )


def _processor_class(model_type: str) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    others = {
        "gemma3": Gemma3ImageProcessorPil,
        "gemma4": Gemma4ImageProcessorPil,
        "mistral3": PixtralImageProcessorPil,
    }
    return others.get(model_type, Qwen2VLImageProcessorPil)
