"""Train the built-in model's drafter: `python -m training.drafter`, some ten minutes on one core.

An EAGLE-3 layer (Li et al. 2025, arXiv 2503.01840) that reads the model's states behind three of its layers. Entry i is
made of the state of token i and of token i + 1, and predicts token i + 2; drafting goes on with the layer's own output
in the place of the state. So it is trained on its own output too: pass j reads the output of pass j - 1. Embedding and
output head are the model's, which stays as it is. It is written in the form of the `speculators` library.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from proa_engine.builtin import builtin_drafter_folder, builtin_model_folder
from training.export import write_json
from training.network import Network, NetworkConfig, rope_tables, rotate
from training.optimizer import make_optimizers, rate_fraction, set_rate
from training.tokens import documents, load_tokenizer
from training.train import next_batch
from training.weights import from_huggingface

_TAPS = (2, 3, 4)  # states before layers of these numbers; 4: behind the last
_ROWS, _TOKENS = 2, 640
_RATE = 3.0  # of the optimizers' rates, which are those of a run of thousands of steps
_LATER_PASS = 0.8  # weight of a pass's loss, relative to the pass before


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model's drafter and write its folder.")
    parser.add_argument("--model", type=Path, default=builtin_model_folder(), help="exported model directory")
    parser.add_argument("--output", type=Path, default=builtin_drafter_folder(), help="drafter directory to write")
    parser.add_argument("--steps", type=int, default=600, help="of 1280 tokens each")
    parser.add_argument("--passes", type=int, default=4, help="draft tokens in a row that it learns to propose")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_flush_denormal(True)
    tokenizer = load_tokenizer(arguments.model / "tokenizer.json")
    network = Network(NetworkConfig(vocab_size=tokenizer.get_vocab_size()))
    network.load_state_dict(from_huggingface(network.config, load_file(arguments.model / "model.safetensors")))
    drafter = Drafter(network)
    train(network, drafter, arguments.model, steps=arguments.steps, passes=arguments.passes, seed=arguments.seed)
    save(drafter, arguments.model, arguments.output, arguments.passes)


class Drafter(nn.Module):
    """One layer over the embedding of the next token beside the state of this one."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        config = network.config
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.config = config
        self.combine = nn.Linear(len(_TAPS) * hidden, hidden, bias=False)
        self.input_norm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.query = nn.Linear(2 * hidden, hidden, bias=False)
        self.key = nn.Linear(2 * hidden, hidden, bias=False)
        self.value = nn.Linear(2 * hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=eps)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        with torch.no_grad():
            self.norm.weight.copy_(network.norm.weight / 4)  # begins unsure

    def forward(self, state: Tensor, embedded: Tensor, passes: "Passes") -> Tensor:
        """The state of each token [B, T, H] and the embedding of the next, to the state that the next pass reads."""
        batch, length, hidden = state.shape
        both = torch.cat([self.input_norm(embedded), self.hidden_norm(state)], dim=-1)
        q, k, v = (
            part(both).view(batch, length, self.config.num_heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = passes.attend(q, k, v).transpose(1, 2).reshape(batch, length, hidden)
        x: Tensor = state + self.out(attended)
        normed = self.ffn_norm(x)
        fed: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class Passes:
    """Keys and values of the passes so far.

    What an engine has cached when it drafts: entries of true tokens (the first pass), then one of each pass since.
    """

    def __init__(self, config: NetworkConfig, length: int) -> None:
        self._cos, self._sin = rope_tables(config, length)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All [B, heads, T, head_dim]."""
        q, k = rotate(q, self._cos, self._sin), rotate(k, self._cos, self._sin)
        self._keys.append(k)
        self._values.append(v)
        age, length = len(self._keys) - 1, q.shape[2]
        true_tokens = torch.ones(length, length, dtype=torch.bool).tril(-age)
        scores = [(q @ self._keys[0].transpose(2, 3)).masked_fill(~true_tokens, -torch.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key in self._shifted(self._keys)]
        weights = (torch.cat(scores, dim=-1) * q.shape[3] ** -0.5).softmax(dim=-1)
        attended: Tensor = weights[..., :length] @ self._values[0]
        for place, value in enumerate(self._shifted(self._values), start=length):
            attended = attended + weights[..., place, None] * value
        return attended

    def _shifted(self, of_passes: Sequence[Tensor]) -> list[Tensor]:
        """Of each later pass, what the token as many places earlier as the pass is older has."""
        age = len(of_passes) - 1
        return [of_pass.roll(age - number, dims=2) for number, of_pass in enumerate(of_passes) if number]


@dataclass(frozen=True, slots=True)
class PassResult:
    """Of one pass over a batch, [learned tokens]."""

    loss: Tensor
    is_right: Tensor  # [B, T] bool: whether the likeliest token is the model's


def run_passes(network: Network, drafter: Drafter, token_ids: Tensor, learn: Tensor, passes: int) -> list[PassResult]:
    """`token_ids` and `learn` [B, T + 1], as `next_batch` makes them."""
    length = token_ids.shape[1] - 2  # entries whose next token but one is known
    with torch.no_grad():
        states = layer_states(network, token_ids[:, :-1])
        wanted = network.logits(network.norm(states[-1]))[:, 1:]
        embedded = network.embedding(token_ids[:, 1 : length + 1])
    cached = Passes(network.config, length)
    state: Tensor = drafter.combine(torch.cat([states[tap - 1] for tap in _TAPS], dim=-1)[:, :length])
    results = []
    for number in range(passes):
        state = drafter(state, embedded, cached)
        learned = learn[:, 2:].clone()
        learned[:, :number] = False  # their state would be one of before the text
        logits = network.logits(drafter.norm(state[learned]))
        loss = functional.cross_entropy(logits, wanted[learned].softmax(dim=-1))
        is_right = torch.zeros_like(learned)
        is_right[learned] = logits.argmax(dim=-1) == wanted[learned].argmax(dim=-1)
        results.append(PassResult(loss, is_right))
        state = state.roll(1, dims=1)
    return results


def layer_states(network: Network, token_ids: Tensor) -> list[Tensor]:
    """The state behind each layer, [B, T, H] each."""
    cos, sin = rope_tables(network.config, token_ids.shape[1])
    x = network.embedding(token_ids)
    states = []
    for block in network.blocks:
        x = block(x, cos, sin)
        states.append(x)
    return states


def accepted_shares(results: Sequence[PassResult], learn: Tensor) -> list[float]:
    """The share of tokens whose first 1, 2, … drafts would all be the model's likeliest tokens."""
    learned = learn[:, 2:]
    places = learned.shape[1] - len(results) + 1
    are_right = learned[:, :places]
    shares = []
    for number, result in enumerate(results):
        are_right = are_right & result.is_right[:, number : number + places]
        shares.append(are_right.sum().item() / learned[:, :places].sum().item())
    return shares


def train(network: Network, drafter: Drafter, model: Path, *, steps: int, passes: int, seed: int) -> None:
    stream = documents(load_tokenizer(model / "tokenizer.json"), Random(seed))
    optimizers = make_optimizers(drafter, drafter)
    for step in range(steps):
        set_rate(optimizers, _RATE * rate_fraction(step, steps))
        token_ids, learn = next_batch(stream, _ROWS, _TOKENS)
        results = run_passes(network, drafter, token_ids, learn, passes)
        loss = sum((_LATER_PASS**number * result.loss for number, result in enumerate(results)), torch.zeros(()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 9 or step == steps - 1:
            shares = " ".join(f"{share:.2f}" for share in accepted_shares(results, learn))
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  accepted {shares}", flush=True)


def save(drafter: Drafter, model: Path, output: Path, passes: int) -> None:
    layer, weights = "layers.0", drafter.state_dict()
    names = {
        "combine": "fc",
        "input_norm": f"{layer}.input_layernorm",
        "hidden_norm": f"{layer}.hidden_norm",
        "query": f"{layer}.self_attn.q_proj",
        "key": f"{layer}.self_attn.k_proj",
        "value": f"{layer}.self_attn.v_proj",
        "out": f"{layer}.self_attn.o_proj",
        "ffn_norm": f"{layer}.post_attention_layernorm",
        "gate": f"{layer}.mlp.gate_proj",
        "up": f"{layer}.mlp.up_proj",
        "down": f"{layer}.mlp.down_proj",
        "norm": "norm",
    }
    output.mkdir(parents=True, exist_ok=True)
    tensors = {f"{theirs}.weight": weights[f"{ours}.weight"].bfloat16() for ours, theirs in names.items()}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    layer_config = {**json.loads((model / "config.json").read_text()), "num_hidden_layers": 1}
    write_json(output / "config.json", speculator_config(layer_config, passes))


def speculator_config(layer: Mapping[str, object], passes: int) -> dict[str, object]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": passes}
    verifier = {"name_or_path": "builtin", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "draft_vocab_size": layer["vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(_TAPS),
        "transformer_layer_config": layer,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
