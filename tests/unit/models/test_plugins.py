"""Architectures and quantizations of installed packages: those of examples/plugin, and packages with mistakes."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from proa_engine.config import EngineConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from proa_engine.models.registry import architecture_of, is_adapted, model_class
from proa_engine.preflight import check_start
from support.int8_rows import quantize_rows
from support.paged_model import PagedModel
from support.plugins import EXAMPLE, on_path, with_example, write_package
from support.tiny_models import VOCAB_SIZE, make_tiny_model

TOKENS = torch.randint(0, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(5)).tolist()
WITHOUT_TORCH = """
import sys
from pathlib import Path
from proa_engine.config import EngineConfig
from proa_engine.preflight import check_start
check_start(EngineConfig(model=sys.argv[1]))
print(sorted({"torch", "proa_example"} & sys.modules.keys()))
"""


@pytest.fixture
def example(tmp_path: Path) -> Iterator[None]:
    with with_example(tmp_path / "packages"):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_path(tmp_path):
        yield tmp_path


def load(folder: Path) -> CausalLM:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


@torch.inference_mode()
def logits_of_transformers(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    result: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return result


@pytest.mark.parametrize("fields", [{}, {"mlp_bias": True, "attention_bias": True}], ids=["plain", "biases"])
def test_the_examples_architecture_has_the_logits_of_transformers(
    fields: dict[str, Any], example: None, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "arcee", seed=3, **fields)
    assert not is_adapted("ArceeForCausalLM")
    model = load(folder)
    assert type(model).__module__ == "proa_example.arcee"
    logits = model.compute_logits(PagedModel(model).prefill(TOKENS, 25))
    torch.testing.assert_close(logits, logits_of_transformers(folder), atol=1e-4, rtol=0)


def test_the_examples_quantization_has_the_logits_of_the_dequantized_weights(example: None, tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", "llama", seed=3, attention_bias=True)
    quantized = quantize_rows(dense, tmp_path / "quantized", except_for="layers.1.mlp")
    check_start(EngineConfig(model=str(quantized), quantization="int8_rows"))  # the flag may repeat the name
    model = load(quantized)
    logits = model.compute_logits(PagedModel(model).prefill(TOKENS, 25))
    torch.testing.assert_close(logits, logits_of_transformers(dense), atol=1e-4, rtol=0)


def test_the_tensors_of_a_plugins_classes_are_the_models_parameters(example: None, tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", "arcee")
    quantized = quantize_rows(dense, tmp_path / "quantized")
    stored, loaded = load_file(quantized / "model.safetensors").values(), load(quantized).parameters()
    assert bytes_of_int8(loaded) == bytes_of_int8(stored) > 0


def bytes_of_int8(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() for each in tensors if each.dtype == torch.int8)


def test_other_forms_of_a_plugins_decoder_are_known(example: None) -> None:
    assert architecture_of({"architectures": ["ArceeForSequenceClassification"]})[0] == "ArceeForCausalLM"


def test_a_start_is_checked_without_torch_and_without_the_plugins_code(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", "arcee")
    quantized = quantize_rows(dense, tmp_path / "quantized")
    entry_points = {
        "proa.models": {"ArceeForCausalLM": "proa_example.arcee:ArceeForCausalLM"},
        "proa.quantization": {"int8_rows": "proa_example.int8_rows:read"},
    }
    write_package(tmp_path / "packages", "proa_example", entry_points)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(quantized)],
        env={"PYTHONPATH": f"{tmp_path / 'packages'}:{EXAMPLE}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_architecture_of_two_packages_ends_every_start(folder: Path) -> None:
    for name in ("twin_a", "twin_b"):
        write_package(folder, name, {"proa.models": {"TwinForCausalLM": f"{name}:X"}})
    model = make_tiny_model(folder / "model")
    with pytest.raises(ValueError, match=r"two packages add the architecture TwinForCausalLM: twin_a 1\.0 and twin_b"):
        check_start(EngineConfig(model=str(model)))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertModel"])
def test_an_architecture_of_the_engines_own_is_refused(name: str, folder: Path) -> None:
    write_package(folder, "own", {"proa.models": {name: "own:X"}})
    with pytest.raises(ValueError, match=rf"own 1\.0 adds the architecture {name}, which Proa has itself"):
        architecture_of({"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("name", ["awq", "fp8_per_block"])
def test_a_quantization_of_the_engines_own_is_refused(name: str, folder: Path) -> None:
    write_package(folder, "own", {"proa.quantization": {name: "own:X"}})
    with pytest.raises(ValueError, match=rf"own 1\.0 adds the quantization {name}, which Proa has itself"):
        check_start(EngineConfig(model=str(make_tiny_model(folder / "model"))))


def test_a_class_that_is_no_decoder_is_refused(folder: Path) -> None:
    write_package(folder, "no_decoder", {"proa.models": {"NoForCausalLM": "no_decoder:X"}}, code="class X: ...")
    with pytest.raises(ValueError, match=r"no_decoder 1\.0 \(no_decoder:X\) is not a class derived from proa_engine\."):
        model_class("NoForCausalLM")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("read = 1", "is not a function that reads quantization_config"),
        ("def read(fields): return fields['bits']", "cannot read quantization_config in config.json: KeyError: 'bits'"),
        ("def read(fields): raise ValueError('bits are missing')", "bits are missing"),
    ],
)
def test_a_quantization_that_cannot_be_read_is_an_error_in_one_sentence(code: str, reason: str, folder: Path) -> None:
    write_package(folder, "plug_q", {"proa.quantization": {"q": "plug_q:read"}}, code=code)
    model = make_tiny_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "q"}}))
    with pytest.raises(ValueError, match=reason):
        read_config.from_folder(model)
    sys.modules.pop("plug_q")


def test_code_in_a_models_folder_is_refused_with_the_ways_out() -> None:
    with pytest.raises(ValueError, match=r"auto_map.* never run; take a version .*, or install a package that adds"):
        architecture_of(
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
        )
