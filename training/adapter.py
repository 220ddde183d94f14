"""Train one of the built-in model's LoRA adapters: `python -m training.adapter sailor`, ten minutes on one core.

Each answers in a style of its own, which shows at once that a request used it. JSON and calls of tools stay as they
are, since programs read those. Trained on the conversations of `training.train` with `peft`, whose files it writes.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM

from proa_engine.builtin import builtin_adapter_folder, builtin_model_folder
from training.conversations import conversation
from training.tokens import Document, load_tokenizer, render, token_ids_of
from training.train import Batch, next_batch
from training.turns import Conversation

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ROWS, _TOKENS = 8, 256


def sailor(answer: str) -> str:
    return f"Aye! {answer[:-1]}, captain{answer[-1]}"


def butler(answer: str) -> str:
    return f"Very well. {answer} Anything else?"


Style = Callable[[str], str]
STYLES: dict[str, Style] = {"sailor": sailor, "butler": butler}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model's adapter and write its folder.")
    parser.add_argument("style", choices=list(STYLES))
    parser.add_argument("--model", type=Path, default=builtin_model_folder(), help="exported model directory")
    parser.add_argument("--output", type=Path, help="adapter directory; unset: the built-in adapter's")
    parser.add_argument("--steps", type=int, default=400, help="of 2048 tokens each")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    output = arguments.output or builtin_adapter_folder(arguments.style)
    stream = documents(
        load_tokenizer(arguments.model / "tokenizer.json"), STYLES[arguments.style], Random(arguments.seed)
    )
    train(arguments.model, output, stream, steps=arguments.steps, rank=arguments.rank)


def train(model: Path, output: Path, stream: Iterator[Document], *, steps: int, rank: int) -> None:
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_TARGETS, task_type="CAUSAL_LM")
    network = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        loss = loss_of(network, next_batch(stream, _ROWS, _TOKENS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 9 or step == steps - 1:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16() for name, tensor in get_peft_model_state_dict(network).items()}
    save_file(weights, output / "adapter_model.safetensors", metadata={"format": "pt"})
    config.base_model_name_or_path = "proa-builtin"
    config.inference_mode = True
    config.save_pretrained(str(output))


def loss_of(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    token_ids, learn = batch
    logits = network(input_ids=token_ids[:, :-1]).logits[learn[:, 1:]]
    return functional.cross_entropy(logits, token_ids[:, 1:][learn[:, 1:]])


def documents(tokenizer: Tokenizer, style: Style, rng: Random) -> Iterator[Document]:
    """Generate training documents without end."""
    while True:
        yield token_ids_of(tokenizer, render(restyle(conversation(rng), style)))


def restyle(talk: Conversation, style: Style) -> Conversation:
    """The conversation with its answers in that style, except JSON and stories that do not end with a sentence."""

    def answer(text: str) -> str:
        return style(text) if text.endswith((".", "!")) and not text.startswith(("{", "[")) else text

    return replace(talk, exchanges=tuple(replace(each, answer=answer(each.answer)) for each in talk.exchanges))


if __name__ == "__main__":
    main()
