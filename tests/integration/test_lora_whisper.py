"""Adapters of Whisper's decoder: tokens equal those of merged weights; others are refused by the names of their
modules."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa.contract import SamplingParams
from proa.lora_module import LoraModule
from proa_engine.core.lora_store import LoraInvalid
from proa_engine.core.operations import LoadLora
from support.adapters import operate
from support.engine import build_core, run
from support.whisper_models import PROMPT, greedy_transcriptions, make_whisper, tone, transcription

RANK, ALPHA, NUM_TOKENS = 4, 8, 10
DECODER = ("self_attn.q_proj", "self_attn.out_proj", "encoder_attn.q_proj", "encoder_attn.out_proj", "fc1", "fc2")
AUDIO = tone(1)
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


def write_adapter(model: Path, folder: Path, modules: Sequence[str], part: str = "decoder") -> Path:
    """An adapter of these modules in the second layer of a part."""
    weights, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        name = f"model.{part}.layers.1.{module}"
        outputs, inputs = weights[f"{name}.weight"].shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / 4
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """A copy of the model with the adapter in its weights."""
    shutil.copytree(model, folder)
    weights, tensors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        weights[f"{module}.weight"] += ALPHA / RANK * product
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_requests_with_and_without_an_adapter_share_an_audio(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(folder, tmp_path / "adapter", DECODER)
    merged = merge(folder, adapter, tmp_path / "merged")
    expected = {
        name: greedy_transcriptions(of, [(AUDIO, PROMPT)], NUM_TOKENS)[0] for name, of in (("", folder), ("a", merged))
    }
    assert expected[""].token_ids != expected["a"].token_ids
    modules = (LoraModule(name="a", path=str(adapter)),)
    with build_core(folder, enable_lora=True, lora_modules=modules) as engine:
        plain = transcription("", AUDIO, PARAMS)
        results = run(engine, [plain, replace(plain, request_id="a", lora_name="a")])
        assert engine.core.counters().audios.num_encoded == 1
    for name, wanted in expected.items():
        assert results[name].token_ids[: wanted.num_sure] == wanted.token_ids[: wanted.num_sure], name


@pytest.mark.parametrize(
    ("modules", "part", "named"),
    [
        (("encoder_attn.v_proj",), "decoder", "layers.1.encoder_attn.v_proj"),
        (("encoder_attn.k_proj", "fc1"), "decoder", "layers.1.encoder_attn.k_proj"),
        (("self_attn.q_proj",), "encoder", "encoder.layers.1.self_attn.q_proj"),
    ],
)
def test_adapters_of_the_encoder_and_of_what_it_leaves_are_refused(
    folder: Path, tmp_path: Path, modules: Sequence[str], part: str, named: str
) -> None:
    adapter = write_adapter(folder, tmp_path / "adapter", modules, part)
    with (
        build_core(folder, enable_lora=True) as engine,
        pytest.raises(LoraInvalid, match=f"{named}, to which this model cannot apply adapters"),
    ):
        operate(engine, LoadLora("a", str(adapter)))
