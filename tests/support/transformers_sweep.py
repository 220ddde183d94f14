"""Run tiny models of all causal language model types through the adapter, and compare their logits with those of
`transformers`.

As a program: write the result to the page that publishes it (`make sweep`).
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from huggingface_hub.errors import StrictDataclassError

from proa_engine.layers.linear import Unquantized
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Slice, Weights
from proa_engine.models import read_config, registry
from proa_engine.models.base import CausalLM
from proa_engine.models.transformers_adapter.model import TransformersForCausalLM
from support.paged_model import CachedSequence, PagedModel
from support.transformers_types import VOCAB_SIZE, model_types, tiny_config, tiny_model

ONE_RANK = ParallelContext()
PAGE = Path(__file__).parents[2] / "docs/models.md"
SINGLE_RANK = "Of these with one rank only: "
BEGIN, END = "<!-- transformers: begin -->", "<!-- transformers: end -->"
LENGTHS = 41, 29  # tokens of the two sequences that are computed together
CHUNKS = 11, 7  # tokens of each in a step; at last single ones
TOLERANCE = 1e-4  # of the logits, relative to the largest
BUILD_ERRORS = (AssertionError, AttributeError, KeyError, RuntimeError, StrictDataclassError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Literal["equal", "refused", "not tried", "differs"]
    reason: str = ""

    @property
    def text(self) -> str:
        return {"not tried": "no tiny model could be built here", "refused": self.reason}.get(
            self.outcome, self.outcome
        )


class StateDict:
    """The `WeightSource` of a model's tensors."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, model: Any) -> None:
        self._tensors = model.state_dict()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[name]
        assert tuple(tensor.shape) == shape
        return (tensor if part is None else tensor.narrow(part.dim, part.start, part.length)).clone()

    def leave(self, prefix: str) -> None:
        raise AssertionError("transformers makes whole models")


@torch.inference_mode()
def judge(model_type: str, parallel: ParallelContext = ONE_RANK) -> Verdict:
    try:
        config = tiny_config(model_type)
        if config.get_text_config(decoder=True) is not config:
            return Verdict("refused", "it has other inputs than text")
        model = tiny_model(config)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
        expected = [logits(model, prompt) for prompt in prompts]
    except BUILD_ERRORS as error:
        return Verdict("not tried", f"{type(error).__name__}: {error}".splitlines()[0][:80])
    try:
        adapted = adapt(config, model, parallel)
    except ValueError as error:
        return Verdict("refused", str(error).rpartition("through transformers: ")[2])
    results = chunked_logits(adapted, [prompt.tolist() for prompt in prompts])
    largest = max(float(each.abs().max()) for each in expected)
    difference = max(float((ours - theirs).abs().max()) for ours, theirs in zip(results, expected, strict=True))
    if difference < TOLERANCE * largest:
        return Verdict("equal")
    return Verdict("differs", f"by {difference / largest:.1g} of the largest logit")


def adapt(config: Any, model: Any, parallel: ParallelContext = ONE_RANK) -> TransformersForCausalLM:
    """The model behind the adapter, even if the engine has a module for it."""
    fields = config.to_dict() | {"architectures": [type(model).__name__]}
    with mock.patch.object(registry, "MODULES", {}):
        read = read_config.from_dicts(fields, {})
    return TransformersForCausalLM(read, Weights(StateDict(model), Unquantized()), parallel)


def logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(prompt))[None]
    result: torch.Tensor = model(prompt[None], position_ids=positions, use_cache=False).logits[0]
    return result


def chunked_logits(adapted: CausalLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of all tokens, of both prompts in one batch and in chunks, the first one's last tokens as decodes."""
    paged = PagedModel(adapted, num_blocks=32)
    sequences = [CachedSequence(prompt) for prompt in prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(each.num_computed < len(each.token_ids) for each in sequences):
        plan = []
        for number, (sequence, chunk) in enumerate(zip(sequences, CHUNKS, strict=True)):
            left = len(sequence.token_ids) - sequence.num_computed
            if left:
                plan.append((number, 1 if sequence.num_computed >= 2 * CHUNKS[0] else min(chunk, left)))
        hidden = paged.step([(sequences[number], size) for number, size in plan])
        for (number, _), rows in zip(plan, hidden, strict=True):
            parts[number].append(adapted.compute_logits(rows))
    return [torch.cat(each) for each in parts]


def has_plan(model_type: str) -> bool:
    """Whether `transformers` can divide the type among ranks."""
    return bool(tiny_config(model_type).base_model_tp_plan)


def read_page() -> dict[str, str]:
    """The published outcome of each type: "equal", or why it is not served."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    published: dict[str, str] = {}
    for line in lines:
        if line.startswith("Equal: "):
            published |= dict.fromkeys(re.findall("`(.+?)`", line), "equal")
        elif line.startswith("| ") and "`" in line:
            reason, names = line.strip("| ").split(" | ")
            published |= dict.fromkeys(re.findall("`(.+?)`", names), reason)
    return published


def read_single_rank_types() -> list[str]:
    """The published types that only one rank can run."""
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(SINGLE_RANK)]
    return re.findall("`(.+?)`", line.removeprefix(SINGLE_RANK))


def write_page(verdicts: Mapping[str, Verdict]) -> None:
    """Replace the list on the page."""
    equal = [f"`{name}`" for name, verdict in verdicts.items() if verdict.outcome == "equal"]
    reasons = defaultdict(list)
    for name, verdict in verdicts.items():
        if verdict.outcome != "equal":
            reasons[verdict.text].append(f"`{name}`")
    rows = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())]
    single = [f"`{name}`" for name, verdict in verdicts.items() if verdict.outcome == "equal" and not has_plan(name)]
    lists = [f"Equal: {', '.join(equal)}.", "", f"{SINGLE_RANK}{', '.join(single)}.", ""]
    table = "\n".join([*lists, "| not served, because | types |", "|---|---|", *rows])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write_page({name: judge(name) for name in model_types()})
