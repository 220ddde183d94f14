"""Models with recurrent layers on a CPU: bits do not depend on chunks, cuts or restarts; larger checkpoints load."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.layers.cache_layers import KeyValueLayer, StateLayer
from proa_engine.layers.mamba2 import Mamba2Options
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from proa_engine.models.single_part_layers import MixerLayerOptions
from support.paged_model import CachedSequence, PagedModel
from support.tiny_models import MIXERS, RECURRENT, VOCAB_SIZE, make_tiny_model

NUM_TOKENS = 90


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def prompts(num: int) -> list[list[int]]:
    rows = random.Random(7)
    return [rows.choices(range(VOCAB_SIZE), k=NUM_TOKENS) for _ in range(num)]


@pytest.mark.parametrize("architecture", [*RECURRENT, *MIXERS])
@torch.inference_mode()
def test_bits_depend_neither_on_chunks_nor_on_cuts_nor_on_restarts(architecture: str, tmp_path: Path) -> None:
    paged = PagedModel(load(make_tiny_model(tmp_path, architecture)))
    first, second = prompts(2)
    whole = paged.prefill(first)
    for chunk in (1, 7, 64):
        assert torch.equal(paged.prefill(first, chunk), whole)

    sequence = CachedSequence(first, cuts=(1, 2, 16, 48, 49))
    other = CachedSequence(second)
    paged.step([(sequence, 1), (other, 20)])
    parts = [paged.step([(sequence, length), (other, 1)])[0] for length in (50, 1, NUM_TOKENS - 52)]
    assert torch.equal(torch.cat(parts), whole[1:])
    for position in sequence.cuts:
        again = sequence.restart(position)
        assert torch.equal(paged.step([(again, NUM_TOKENS - position)])[0], whole[position:])


@torch.inference_mode()
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_5_text")
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype)
        logits.append(model.compute_logits(PagedModel(model, dtype=dtype).prefill(prompts(1)[0], 25)).float())
    torch.testing.assert_close(logits[1], logits[0], atol=0.3, rtol=0)


def test_layers_declare_states_and_keys_and_values(tmp_path: Path) -> None:
    recurrent, attention, _ = load(make_tiny_model(tmp_path, "qwen3_5_text")).cache_layers()
    channels = 2 * 2 * 16 + 6 * 24
    states = ((6, 24, 16), torch.float32), ((channels, 3), torch.float32)
    assert recurrent == StateLayer(states, inputs=((channels, torch.float32), (2 * 6, torch.float32)))
    assert attention == KeyValueLayer(num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(("text", "name"), [("qwen3_5_text", "Qwen3_5"), ("qwen3_5_moe_text", "Qwen3_5Moe")])
@torch.inference_mode()
def test_the_text_model_of_a_checkpoint_with_images_is_loaded(text: str, name: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "text", text)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(source / "model.safetensors")
    renamed = {key.replace("model.", "model.language_model.", 1): value for key, value in stacked(tensors).items()}
    extra = {"model.visual.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(3)}
    save_file(renamed | extra, whole / "model.safetensors")
    fields: dict[str, Any] = json.loads((source / "config.json").read_text())
    if "num_experts" in fields:
        fields.pop("intermediate_size", None)  # which only models with plain layers have
    # Positions by time, height and width take turns in the frequencies; for text they are equal.
    fields["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": fields}
    (whole / "config.json").write_text(json.dumps(config))
    hidden = [PagedModel(load(folder)).prefill(prompts(1)[0]) for folder in (source, whole)]
    assert torch.equal(*hidden)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With each matrix of all experts as one tensor."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for router in (name for name in tensors if name.endswith("mlp.gate.weight")):
        prefix = router.removesuffix("gate.weight") + "experts"
        experts = range(tensors[router].shape[0])
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in experts])
            for kind in ("gate", "up", "down")
        )
        result |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return result


@pytest.mark.parametrize(
    ("field", "value"),
    [("linear_conv_kernel_dim", 3), ("linear_num_value_heads", 5), ("layer_types", ["sliding_attention"] * 3)],
)
def test_what_is_not_supported_is_named(field: str, value: object, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_5_text")
    fields = json.loads((folder / "config.json").read_text()) | {field: value}
    with pytest.raises(ValueError, match=r"kernel_dim 3|value_heads 5|sliding_attention"):
        read_config.from_dicts(fields, {})


def mamba2(fields: Mapping[str, Any]) -> Mamba2Options:
    """The options of the first layer of Nemotron-H."""
    layer = read_config.from_dicts(fields, {}).layers[0]
    assert isinstance(layer, MixerLayerOptions)
    assert isinstance(layer.mixer, Mamba2Options)
    return layer.mixer


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("[0.0, Infinity]", (0.0, math.inf)),
        ('[0.0, "Infinity"]', (0.0, math.inf)),
        ('[0.0, {"__float__": "Infinity"}]', (0.0, math.inf)),
        ("[0.0, 1e30]", (0.0, 1e30)),
        ("null", (0.0, math.inf)),
        ("[0.01, 0.5]", (0.01, 0.5)),
    ],
)
def test_a_time_step_has_no_limits_but_the_configured_ones(
    limit: str, expected: tuple[float, float], tmp_path: Path
) -> None:
    """`transformers` limits it in prompts by `time_step_min`, which is for drawing weights, too."""
    fields = json.loads((make_tiny_model(tmp_path, "nemotron_h") / "config.json").read_text())
    fields |= {"time_step_min": 0.001, "time_step_limit": json.loads(limit)}
    assert mamba2(fields).step_limit == expected


def test_older_configurations_are_those_of_the_present_names(tmp_path: Path) -> None:
    fields = json.loads((make_tiny_model(tmp_path / "nemotron", "nemotron_h") / "config.json").read_text())
    layers = read_config.from_dicts(fields, {}).layers
    del fields["layers_block_type"]
    assert read_config.from_dicts(fields | {"hybrid_override_pattern": "ME*-ME"}, {}).layers == layers
    older = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]
    assert read_config.from_dicts(fields | {"layers_block_type": older}, {}).layers == layers
    with pytest.raises(ValueError, match="layer type X is not supported"):
        read_config.from_dicts(fields | {"hybrid_override_pattern": "MX"}, {})

    fields = json.loads((make_tiny_model(tmp_path / "lfm2", "lfm2") / "config.json").read_text())
    layers = read_config.from_dicts(fields, {}).layers
    del fields["layer_types"]
    assert read_config.from_dicts(fields | {"full_attn_idxs": [1]}, {}).layers == layers


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_text"])
@torch.inference_mode()
def test_gates_are_a_product_of_their_own_in_quantized_checkpoints(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    plain = PagedModel(load(folder)).prefill(prompts(1)[0])
    config = folder / "config.json"
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["layers"]}  # leaves nothing to quantize
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    torch.testing.assert_close(PagedModel(load(folder)).prefill(prompts(1)[0]), plain, atol=1e-4, rtol=0)
