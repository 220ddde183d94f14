"""Train a drafter: `python -m training.drafter`, for the built-in model some ten minutes on one core.

An EAGLE-3 layer (Li et al. 2025, arXiv 2503.01840) that reads the model's states behind three of its layers. Entry i is
made of the state of token i and of token i + 1, and predicts token i + 2; drafting goes on with the layer's own output
in the place of the state. So it is trained on its own output too: pass j reads the output of pass j - 1. Embedding and
output head are the model's, which stays as it is. It is written in the form of the `speculators` library.

The text is the built-in model's, generated without end, or another Llama's answers (`training.own_answers`). The model
computes each batch of answers once, and the drafter knows their commonest tokens alone: products with all rows of
SmolLM2's head, 49,152, would take most of the time.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from proa_engine.builtin import builtin_drafter_folder, builtin_model_folder
from training.export import write_json
from training.network import Network, NetworkConfig, rope_tables, rotate
from training.optimizer import make_optimizers, rate_fraction, set_rate
from training.own_answers import read_answers
from training.tokens import Document, documents, load_tokenizer
from training.train import next_batch
from training.weights import load_network

_ROWS, _TOKENS = 2, 640  # of a batch of generated text
_ANSWERS_TOKENS = 512  # at most, of a batch of answers, with what fills the shorter ones
_RATE = 3.0  # of the optimizers' rates, which are those of a run of thousands of steps
_LATER_PASS = 0.8  # weight of a pass's loss, relative to the pass before


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model's drafter and write its folder.")
    parser.add_argument("--model", type=Path, default=builtin_model_folder(), help="directory of a Llama")
    parser.add_argument("--output", type=Path, default=builtin_drafter_folder(), help="drafter directory to write")
    parser.add_argument("--answers", type=Path, help="file of training.own_answers; default: generated text")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the answers that the drafter knows")
    parser.add_argument("--taps", type=int, nargs=3, default=(2, 3, 4), help="it reads the states before these layers")
    parser.add_argument("--steps", type=int, default=600, help="of 1280 tokens each")
    parser.add_argument("--passes", type=int, default=4, help="draft tokens in a row that it learns to propose")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_flush_denormal(True)
    network, rng = load_network(arguments.model), Random(arguments.seed)
    if arguments.answers is None:
        drafter = Drafter(network, arguments.taps)
        batches = generated_batches(network, drafter, arguments.model, rng)
    else:
        answers = read_answers(arguments.answers)
        drafter = Drafter(network, arguments.taps, common_tokens(answers, arguments.vocabulary))
        batches = answers_batches(network, drafter, answers, rng)
    train(drafter, network.embedding, batches, steps=arguments.steps, passes=arguments.passes)
    save(drafter, arguments.model, arguments.output, arguments.passes)


class Drafter(nn.Module):
    """One layer over the embedding of the next token beside the state of this one.

    `head` has the rows of the model's head for the tokens that it knows, `token_ids`; None: for all.
    """

    head: Tensor

    def __init__(self, network: Network, taps: Sequence[int], token_ids: Tensor | None = None) -> None:
        super().__init__()
        config, head = network.config, network.embedding.weight.detach()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        kv_size = config.num_kv_heads * config.head_dim
        self.config, self.taps, self.token_ids = config, tuple(taps), token_ids
        self.register_buffer("head", head if token_ids is None else head[token_ids], persistent=False)
        self.combine = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.input_norm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.query = nn.Linear(2 * hidden, hidden, bias=False)
        self.key = nn.Linear(2 * hidden, kv_size, bias=False)
        self.value = nn.Linear(2 * hidden, kv_size, bias=False)
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
            part(both).view(batch, length, -1, self.config.head_dim).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = passes.attend(q, k, v).transpose(1, 2).reshape(batch, length, hidden)
        x: Tensor = state + self.out(attended)
        normed = self.ffn_norm(x)
        fed: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + fed

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] -> [..., tokens that it knows]."""
        return functional.linear(self.norm(state), self.head)


class Passes:
    """Keys and values of the passes so far.

    What an engine has cached when it drafts: entries of true tokens (the first pass), then one of each pass since.
    """

    def __init__(self, config: NetworkConfig, length: int) -> None:
        self._cos, self._sin = rope_tables(config, length)
        self._queries = config.num_heads // config.num_kv_heads  # of a head of keys
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All [B, heads, T, head_dim]; returns as many as `q` has."""
        q, k = rotate(q, self._cos, self._sin), rotate(k, self._cos, self._sin)
        self._keys.append(k.repeat_interleave(self._queries, dim=1))
        self._values.append(v.repeat_interleave(self._queries, dim=1))
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
class Batch:
    """Text, and what the model computes of it. Entry i reads the state of token i and token i + 1."""

    next_ids: Tensor  # [B, T] of token i + 1
    states: Tensor  # [B, T, taps * H] of token i
    hidden: Tensor  # [B, T, H] of token i + 1, behind the last norm: the logits of token i + 2
    learn: Tensor  # [B, T] bool: whether to learn token i + 2
    is_known: Tensor  # [B, T] bool: whether to learn it, and it is in the drafter's vocabulary


@torch.no_grad()
def make_batch(network: Network, drafter: Drafter, token_ids: Tensor, learn: Tensor) -> Batch:
    """`token_ids` and `learn` [B, T + 2]."""
    states = layer_states(network, token_ids[:, :-1])
    learn, known = learn[:, 2:], drafter.token_ids
    return Batch(
        next_ids=token_ids[:, 1:-1],
        states=torch.cat([states[tap - 1][:, :-1] for tap in drafter.taps], dim=-1),
        hidden=network.norm(states[-1][:, 1:]),
        learn=learn,
        is_known=learn if known is None else learn & torch.isin(token_ids[:, 2:], known),
    )


def generated_batches(network: Network, drafter: Drafter, model: Path, rng: Random) -> Iterator[Batch]:
    """Yield new text of the built-in model without end."""
    stream = documents(load_tokenizer(model / "tokenizer.json"), rng)
    while True:
        yield make_batch(network, drafter, *next_batch(stream, _ROWS, _TOKENS))


def answers_batches(network: Network, drafter: Drafter, answers: Sequence[Document], rng: Random) -> Iterator[Batch]:
    """Yield batches of answers of about the same length, all of them again and again, each time in another order."""
    groups: list[list[Document]] = [[]]
    for answer in sorted(answers, key=lambda each: len(each[0])):
        if (len(groups[-1]) + 1) * len(answer[0]) > _ANSWERS_TOKENS:
            groups.append([])
        groups[-1].append(answer)
    made = dict[int, Batch]()
    while True:
        for number in rng.sample(range(len(groups)), len(groups)):
            if number not in made:
                made[number] = make_batch(network, drafter, *_filled(groups[number]))
            yield made[number]


def _filled(group: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Token ids and what to learn of them, [B, length of the longest]. The shorter ones are filled with token 0."""
    width = max(len(token_ids) for token_ids, _ in group)
    ids = torch.tensor([token_ids + [0] * (width - len(token_ids)) for token_ids, _ in group])
    return ids, torch.tensor([learn + [False] * (width - len(learn)) for _, learn in group])


def common_tokens(answers: Sequence[Document], count: int) -> Tensor:
    """The tokens to learn that are most frequent, ascending."""
    counts = Counter(
        token for ids, learn in answers for token, is_learned in zip(ids, learn, strict=True) if is_learned
    )
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


@dataclass(frozen=True, slots=True)
class PassResult:
    """Of one pass over a batch."""

    loss: Tensor
    is_right: Tensor  # [B, T] bool: whether the likeliest token is the model's


def run_passes(drafter: Drafter, embedding: nn.Embedding, batch: Batch, passes: int) -> list[PassResult]:
    with torch.no_grad():
        embedded = embedding(batch.next_ids)
    cached = Passes(drafter.config, batch.next_ids.shape[1])
    state: Tensor = drafter.combine(batch.states)
    results = []
    for number in range(passes):
        state = drafter(state, embedded, cached)
        learned = batch.is_known.clone()
        learned[:, :number] = False  # their state would be one of before the text
        logits, wanted = drafter.logits(state[learned]), functional.linear(batch.hidden[learned], drafter.head)
        is_right = torch.zeros_like(learned)
        is_right[learned] = logits.argmax(dim=-1) == wanted.argmax(dim=-1)
        results.append(PassResult(functional.cross_entropy(logits, wanted.softmax(dim=-1)), is_right))
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
    """The share of tokens to learn [B, T] whose first 1, 2, … drafts would all be the model's likeliest tokens."""
    places = learn.shape[1] - len(results) + 1
    are_right = learn[:, :places]
    shares = []
    for number, result in enumerate(results):
        are_right = are_right & result.is_right[:, number : number + places]
        shares.append(are_right.sum().item() / learn[:, :places].sum().item())
    return shares


def train(drafter: Drafter, embedding: nn.Embedding, batches: Iterator[Batch], *, steps: int, passes: int) -> None:
    optimizers = make_optimizers(drafter, drafter)
    for step in range(steps):
        set_rate(optimizers, _RATE * rate_fraction(step, steps))
        batch = next(batches)
        results = run_passes(drafter, embedding, batch, passes)
        loss = sum((_LATER_PASS**number * result.loss for number, result in enumerate(results)), torch.zeros(()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 9 or step == steps - 1:
            shares = " ".join(f"{share:.2f}" for share in accepted_shares(results, batch.learn))
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
    if drafter.token_ids is not None:
        tensors["d2t"] = drafter.token_ids - torch.arange(len(drafter.token_ids))
        tensors["lm_head.weight"] = drafter.head.bfloat16()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    layer_config = {**json.loads((model / "config.json").read_text()), "num_hidden_layers": 1}
    write_json(output / "config.json", speculator_config(drafter, model.name, layer_config, passes))


def speculator_config(drafter: Drafter, model: str, layer: Mapping[str, object], passes: int) -> dict[str, object]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": passes}
    verifier = {"name_or_path": model, "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "draft_vocab_size": len(drafter.head),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps),
        "transformer_layer_config": layer,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
