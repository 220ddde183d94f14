"""LoRA adapters with random weights in the format of `peft`, the models that they make, and what those generate."""

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from proa.contract import EngineCoreRequest, SamplingParams
from proa.lora_module import LoraModule
from proa_engine.core.operations import Operation
from support.engine import Engine, Result, request
from support.tiny_models import BYTES

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_TOKENS = 12
MARGIN = 1e-4  # between the two most likely tokens; below it rounding may decide
Generated = list[tuple[list[int], int]]  # for each prompt: tokens, and how many of them are sure


@dataclass(frozen=True)
class Adapter:
    """`modules` are the last names of those that it adapts."""

    name: str
    rank: int = 8
    alpha: float = 16.0
    modules: tuple[str, ...] = ALL_LINEAR
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


ADAPTERS = (
    Adapter("all"),
    Adapter("some", rank=3, alpha=6, modules=("q_proj", "v_proj", "down_proj"), use_rslora=True),
    Adapter("others", rank=16, alpha=8, modules=("k_proj", "o_proj", "up_proj")),
)


def load_plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_adapter(model: Path, folder: Path, adapter: Adapter, *, seed: int = 0, **config: Any) -> Path:
    """Write an adapter without `peft`. `config` are more fields of its configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _weights(load_plain(model), adapter).items():
        outputs, inputs = weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(adapter.rank, inputs, generator=generator) / 10
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, adapter.rank, generator=generator) / 10
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.use_rslora}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def merged(model: Path, folder: Path, adapter: Adapter) -> Any:
    """The model with the adapter in its weights."""
    from safetensors.torch import load_file

    tensors, adapted = load_file(folder / "adapter_model.safetensors"), load_plain(model)
    for name, weight in _weights(adapted, adapter).items():
        a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        weight.data += adapter.scale * b @ a
    return adapted


def write_with_peft(model: Path, folder: Path, adapter: Adapter, *, seed: int = 0) -> Path:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        target_modules=list(adapter.modules),
        use_rslora=adapter.use_rslora,
    )
    adapted: Any = get_peft_model(load_plain(model), settings)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, 0.1)
    adapted.save_pretrained(folder)
    return folder


def run_by_peft(model: Path, folder: Path, *, merge: bool = False) -> Any:
    """The model with an adapter, beside the weights or merged into them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(load_plain(model), folder)
    return adapted.merge_and_unload() if merge else adapted


def _weights(model: Any, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The weights of the modules, by the module's name."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {name: module.weight for name, module in linear if name.rpartition(".")[2] in adapter.modules}


def make_prompts() -> list[list[int]]:
    """Some with a common prefix."""
    rows = random.Random(5)
    shared = rows.choices(range(BYTES), k=40)
    prompts = [rows.choices(range(BYTES), k=rows.randint(1, 60)) for _ in range(3)]
    return prompts + [shared + rows.choices(range(BYTES), k=rows.randint(1, 20)) for _ in range(3)]


PROMPTS = make_prompts()


@torch.inference_mode()
def generate(model: Any) -> Generated:
    """Greedy decoding of all prompts, one at a time."""
    outputs = []
    for prompt in PROMPTS:
        token_ids, num_sure, cache, step_input = list(prompt), NUM_TOKENS, None, list(prompt)
        for step in range(NUM_TOKENS):
            output = model(input_ids=torch.tensor([step_input]), past_key_values=cache, use_cache=True)
            cache, best = output.past_key_values, output.logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) < MARGIN:
                num_sure = min(num_sure, step)
            step_input = [int(best.indices[0])]
            token_ids += step_input
        outputs.append((token_ids[len(prompt) :], num_sure))
    return outputs


def lora_modules(folder: Path, *adapters: Adapter) -> tuple[LoraModule, ...]:
    """The adapters in the folders of their names."""
    return tuple(LoraModule(name=adapter.name, path=str(folder / adapter.name)) for adapter in adapters)


def requests(names: Sequence[str]) -> list[EngineCoreRequest]:
    """Each prompt with each adapter, none if the name is empty."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        replace(request(f"{name}/{index}", prompt, params), lora_name=name)
        for index, prompt in enumerate(PROMPTS)
        for name in names
    ]


def assert_equal(results: Mapping[str, Result], expected: Mapping[str, Generated]) -> None:
    for name, outputs in expected.items():
        for index, (token_ids, num_sure) in enumerate(outputs):
            assert results[f"{name}/{index}"].token_ids[:num_sure] == token_ids[:num_sure], f"{name!r}, prompt {index}"
    assert sum(num_sure for outputs in expected.values() for _, num_sure in outputs) > 0.9 * NUM_TOKENS * len(results)


def operate(engine: Engine, operation: Operation[Any]) -> Any:
    """Step until an operator's call is done, and return its result."""
    done = engine.core.operate(operation)
    while not done.done():
        engine.core.wait_for_work(timeout=1.0)
        engine.core.step()
    return done.result()
