"""A real model in every format that can be made of it: its perplexity is that of the dequantized weights in
`transformers`, which rounds activations too where the format does.

Formats with blocks of 128 x 128 cannot be made: the model's width is 576.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support import real_model, real_texts
from support.paged_model import PagedModel
from support.quantized_models import (
    FP4_FORMATS,
    FP8_FORMATS,
    INT8_FORMATS,
    INT_FORMATS,
    Format,
    Tensors,
    quantized_tensors,
)
from support.real_model import Record
from support.rounded_inputs import Hook, round_to_floats, round_to_integers

NOT_MADE = ("compressed-tensors, blocks", "fp8, blocks", "fp8, blocks, some not converted")
OF_TWO_LAYERS = ("auto-round, keys in 8 bits",)  # its configuration names the layers
FORMATS = {
    f"{kind}: {name}": each
    for kind, formats in {"fp8": FP8_FORMATS, "int8": INT8_FORMATS, "int": INT_FORMATS, "fp4": FP4_FORMATS}.items()
    for name, each in formats.items()
    if name not in NOT_MADE + OF_TWO_LAYERS
}
SAME = 5e-4  # relative difference of perplexities where only weights are quantized
# Where activations are too, what is rounded up or down depends on the last bits of sums, and behind a few layers on all
# of them: weights that differ by 1e-7 change the perplexity of `transformers` itself by up to a fifth. Proa's lies in
# the range of such models, or this close to it.
NEAR = 3e-2
NUM_TWINS = 5
Range = tuple[float, float]


@pytest.fixture(scope="session")
def text() -> list[int]:
    token_ids: list[int] = real_model.tokenizer().encode(real_texts.DOCUMENTS["story"])
    return token_ids


@pytest.fixture(scope="session")
def tensors() -> Tensors:
    return load_file(real_model.FOLDER / "model.safetensors")


@pytest.fixture(scope="session")
def twin() -> Any:
    """A model of `transformers`, to be loaded with dequantized weights."""
    return deepcopy(real_model.reference())


@pytest.fixture(scope="session")
def unquantized(text: list[int]) -> float:
    return real_model.perplexity(real_model.logprobs(real_model.reference(), text), text)


@pytest.fixture(scope="session")
def ranges(text: list[int]) -> Mapping[str, Range]:
    """The least and the largest input of each matrix, which quantizers with static scales measure."""
    found: dict[str, Range] = {}

    def watch(name: str) -> Hook:
        def hook(module: torch.nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            found[name] = (min(0.0, float(args[0].min())), max(0.0, float(args[0].max())))
            return args

        return hook

    with hooked(real_model.reference(), (), watch):
        real_model.logprobs(real_model.reference(), text)
    return found


@contextmanager
def hooked(model: Any, plain: tuple[str, ...], make: Callable[[str], Hook]) -> Iterator[None]:
    """Hook the matrices of the layers, except those of `plain`. `make` gets their names."""
    handles = [
        module.register_forward_pre_hook(make(name))
        for name, module in model.named_modules()
        if name.endswith("_proj") and not name.startswith(plain)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def proas_perplexity(folder: Path, text: list[int], quantization: str | None = None) -> float:
    model = load_model(
        folder,
        read_config.from_folder(folder, quantization),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        load_format="auto",
        report=lambda line: None,
    )
    with torch.inference_mode():
        logits = model.compute_logits(PagedModel(model, num_blocks=32).prefill(text))
        return real_model.perplexity(logits.log_softmax(-1), text)


def calibrate(stored: Tensors, ranges: Mapping[str, Range]) -> None:
    """Replace the static scales of inputs, which suit random weights, by those of the real inputs."""
    for name in [each for each in stored if each.endswith(".input_scale")]:
        module = name.removesuffix(".input_scale")
        scale, zero = static_scale(
            ranges[module], stored[f"{module}.weight"].dtype, f"{module}.input_zero_point" in stored
        )
        stored[name] = torch.full_like(stored[name], scale)
        if f"{module}.input_zero_point" in stored:
            stored[f"{module}.input_zero_point"].fill_(zero)


def static_scale(of: Range, dtype: torch.dtype, has_zero: bool) -> tuple[float, int]:
    """The scale of inputs in this range, and their zero."""
    if has_zero:
        scale = (of[1] - of[0]) / 255
        return scale, round(-128 - of[0] / scale)
    return max(of[1], -of[0]) / (127.5 if dtype is torch.int8 else 448), 0


def rounding(name: str, stored: Tensors) -> Callable[[str], Hook] | None:
    """What a format makes of the inputs of each matrix; None: nothing."""
    if not name.startswith(("fp8", "int8")):
        return None

    def make(module: str) -> Hook:
        scale = stored.get(f"{module}.input_scale")
        static = None if scale is None else float(scale)
        if name.startswith("fp8"):
            return round_to_floats(None, static)
        zero = int(stored.get(f"{module}.input_zero_point", torch.tensor(0)))
        return round_to_integers(symmetric="asymmetric" not in name, scale=static, zero=zero)

    return make


def twins_perplexities(
    twin: Any, dense: Tensors, text: list[int], plain: tuple[str, ...], make: Callable[[str], Hook] | None
) -> list[float]:
    """Of the dequantized weights, and where inputs are rounded, of others that are as near as sums are exact."""
    found = []
    for seed in range(1 if make is None else NUM_TWINS):
        generator = torch.Generator().manual_seed(seed)
        changed = {name: slightly_changed(each.float(), generator, seed * 1e-7) for name, each in dense.items()}
        twin.load_state_dict(changed, strict=False)
        with hooked(twin, plain, make) if make is not None else nullcontext():
            found.append(real_model.perplexity(real_model.logprobs(twin, text), text))
    return found


def slightly_changed(weight: torch.Tensor, generator: torch.Generator, by: float) -> torch.Tensor:
    """`by`: the standard deviation of the relative change."""
    return weight * (1 + by * torch.randn(weight.shape, generator=generator)) if by else weight


def fp8_at_load(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Nothing is stored of what `--quantization fp8` makes of a matrix."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {}, (weight / scale).to(torch.float8_e4m3fn).float() * scale


def check(ours: float, theirs: list[float], allowed: float) -> None:
    assert min(theirs) * (1 - allowed) <= ours <= max(theirs) * (1 + allowed)


def show(name: str, ours: float, theirs: list[float], unquantized: float, record: Record) -> None:
    reference = " to ".join(f"{each:.4f}" for each in sorted({min(theirs), max(theirs)}))
    figures = f"{ours:.4f}; of transformers {reference}; {ours / unquantized - 1:+.2%} by quantization"
    record(f"perplexity, {name}", figures)


def test_perplexity_of_the_unquantized_model(text: list[int], unquantized: float, record: Record) -> None:
    ours = proas_perplexity(real_model.FOLDER, text)
    assert ours == pytest.approx(unquantized, rel=SAME)
    record(f"perplexity of {len(text)} tokens, unquantized", f"{ours:.4f}; of transformers {unquantized:.4f}")


def test_perplexity_with_weights_quantized_at_load(
    text: list[int], unquantized: float, twin: Any, tensors: Tensors, record: Record
) -> None:
    ours = proas_perplexity(real_model.FOLDER, text, "fp8")
    _, dense = quantized_tensors(tensors, Format({}, fp8_at_load))
    theirs = twins_perplexities(twin, dense, text, (), lambda module: round_to_floats(None, None))
    check(ours, theirs, NEAR)
    show("--quantization fp8", ours, theirs, unquantized, record)


@pytest.mark.parametrize("name", FORMATS)
def test_perplexity_of_a_quantized_checkpoint(
    name: str,
    text: list[int],
    unquantized: float,
    twin: Any,
    tensors: Tensors,
    ranges: Mapping[str, Range],
    record: Record,
    tmp_path: Path,
) -> None:
    format = FORMATS[name]
    stored, dense = quantized_tensors(tensors, format)
    calibrate(stored, ranges)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((real_model.FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": format.config}))
    ours = proas_perplexity(tmp_path, text)
    (tmp_path / "model.safetensors").unlink()  # pytest keeps the folders of its last runs
    make = rounding(name, stored)
    theirs = twins_perplexities(twin, dense, text, format.plain, make)
    check(ours, theirs, SAME if make is None else NEAR)
    show(name, ours, theirs, unquantized, record)
