"""The model that the tests of vLLM and SGLang get in place of the one they name: the built-in one.

Tests of classes, rerankers and embeddings get it with as many classes or values, and tokens, as the named model has;
what is added is random. Tests of adapters get the built-in ones. Tests of reasoning get a chat template that opens it,
and weights with which the model thinks `THOUGHTS` and then answers, or never ends its reasoning. Tests whose answers
are to have a certain length get weights with which the model never ends an answer, and tests of decisions weights with
which each letter is equally likely.
"""

import json
import shutil
from enum import Enum
from itertools import pairwise
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import torch
import transformers
from peers.weights import Weights
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

BUILTIN = Path(__file__).parents[2] / "engine" / "proa_engine" / "builtin" / "model"
ADAPTERS = BUILTIN.parent / "adapters"
FOLDER = Path("model")  # below the folder in which the tests run
LABELS = {"apeach": 2, "reranker": 1, "reward": 1}  # classes of the models with such a name
EMBEDDING_SIZES = {"e5-small": 384, "bge-base": 768, "colbert-small": 96}
DENSE = "2_Dense"  # folder of the built-in model's linear layer for embeddings
CONTEXT = 32768  # tokens: the longest that a test needs
VOCABULARY = 10240  # tokens: above each id that a test names, but of those models:
VOCABULARIES = {
    "apeach": 151936,
    "reranker": 250002,
    "e5-small": 250037,
    "bge-base": 30522,
    "colbert-small": 30528,
    "reward": 92544,
    "Llama-3": 128256,
}
REASONING = ("<think>", "</think>")
THOUGHTS = tuple(f" step {number}," for number in range(1, 33))  # tokens
# The built-in chat template takes no other roles and has no reasoning.
_NO_ROLE = """raise_exception('roles are system, user, assistant and tool')"""
_ANY_ROLE = """'<|user|>' + (message['content'] or '') | trim + '<|end|>'"""
_ANSWER = "{{ '<|assistant|>' }}"
_NO_REASONING = "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '' }}"
_OPEN_REASONING = "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>' }}"


class ModelConfig:
    """What the tests use of vLLM's class."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def get_vocab_size(self) -> int:
        size: int = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
        return size


def write_model() -> None:
    """Write the model to `FOLDER`, with tokens for reasoning and a padded vocabulary."""
    shutil.copytree(BUILTIN, FOLDER)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*REASONING, *THOUGHTS)])
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    _pad_vocabulary(FOLDER, VOCABULARY)
    _change(FOLDER / "config.json", max_position_embeddings=CONTEXT)
    _change(FOLDER / "tokenizer_config.json", chat_template=_template(_NO_REASONING), model_max_length=CONTEXT)
    _change(FOLDER / "generation_config.json", temperature=0.0)  # of requests that say none: the same answer each time


class Kind(Enum):
    """Of a model, by how its answers end."""

    ENDS = "ends"
    RUNS_ON = "runs-on"
    THINKS_FIRST = "thinks-first"
    THINKS_ON = "thinks-on"
    LABELS = "labels"  # answers with a letter


def folder_of(name: str, kind: Kind) -> Path:
    """Of the model that stands for `name`."""
    labels, size = _listed(LABELS, name, 0), _listed(EMBEDDING_SIZES, name, 0)
    vocabulary = _listed(VOCABULARIES, name, VOCABULARY)
    if (labels, size, vocabulary, kind) == (0, 0, VOCABULARY, Kind.ENDS):
        return FOLDER
    folder = Path(f"{FOLDER}-{labels}-labels-{size}-values-{vocabulary}-tokens-{kind.value}")
    if not folder.exists():
        shutil.copytree(FOLDER, folder)
        _pad_vocabulary(folder, vocabulary)
        if labels:
            _add_classes(folder, labels)
        elif size:
            _resize_embeddings(folder, size)
            if "colbert" in name:
                modules = json.loads((folder / "modules.json").read_text())
                modules = [each for each in modules if each["path"] in ("", DENSE)]  # without the pooling
                (folder / "modules.json").write_text(json.dumps(modules))
        elif kind is not Kind.ENDS:
            _change_end(folder, kind)
    return folder


def _listed(values: dict[str, int], name: str, otherwise: int) -> int:
    """The value of the first word of `values` that is in the model's name."""
    return next((value for word, value in values.items() if word in name), otherwise)


def _change_end(folder: Path, kind: Kind) -> None:
    if kind is not Kind.RUNS_ON:
        reasoning = "" if kind is Kind.LABELS else _OPEN_REASONING
        _change(folder / "tokenizer_config.json", chat_template=_template(reasoning))
    if kind is Kind.THINKS_ON:
        return
    weights, ids = Weights(folder), Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    if kind is Kind.RUNS_ON:
        weights.never_write(ids["<|end|>"])
    elif kind is Kind.LABELS:
        weights.follow(ids["<|assistant|>"], *(ids[letter] for letter in ascii_uppercase))
    else:
        opening, closing = (ids[text] for text in REASONING)
        for token_id, following in pairwise([opening, *(ids[text] for text in THOUGHTS), closing]):
            weights.follow(token_id, following)
        weights.read_as(closing, ids["<|assistant|>"])
    weights.save()
    _change(folder / "config.json", tie_word_embeddings=False)


class Hub:
    """What the tests use of huggingface_hub's `HfApi`: adapters, and the linear layer of a ColBERT model."""

    def snapshot_download(self, repo_id: str) -> str:
        return str(ADAPTERS / ("butler" if "Woof" in repo_id else "sailor"))

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        return str(folder_of(repo_id, Kind.ENDS) / DENSE / filename)


def _pad_vocabulary(folder: Path, size: int) -> None:
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    padding = embeddings[:1].expand(size - len(embeddings), -1)  # the token <|pad|>, which the model never writes
    weights["model.embed_tokens.weight"] = torch.cat([embeddings, padding])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _change(folder / "config.json", vocab_size=size)


def _add_classes(folder: Path, labels: int) -> None:
    (folder / "modules.json").unlink()
    weights = load_file(folder / "model.safetensors")
    size = weights["model.norm.weight"].numel()
    noise = torch.randn(labels, size, generator=torch.Generator().manual_seed(labels)) * 0.1
    save_file(weights | {"score.weight": noise.bfloat16()}, folder / "model.safetensors", {"format": "pt"})
    names = dict(enumerate(["Default", "Spoiled"][:labels]))
    _change(folder / "config.json", architectures=["LlamaForSequenceClassification"], id2label=names)


def _resize_embeddings(folder: Path, size: int) -> None:
    """What is more of each embedding are random sums of the hidden state's values."""
    path = folder / DENSE / "model.safetensors"
    weight = load_file(path)["linear.weight"]
    noise = torch.randn(size, weight.shape[1], generator=torch.Generator().manual_seed(size)) * 0.1
    save_file({"linear.weight": torch.cat([weight[:size], noise[len(weight) :].to(weight.dtype)])}, path)
    _change(path.with_name("config.json"), out_features=size)


def _template(reasoning: str) -> str:
    """The built-in chat template, with any role and with `reasoning` before the answer."""
    template = json.loads((BUILTIN / "tokenizer_config.json").read_text())["chat_template"]
    assert _NO_ROLE in template
    assert _ANSWER in template
    return str(template).replace(_NO_ROLE, _ANY_ROLE).replace(_ANSWER, _ANSWER + reasoning)


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load_decoder(name: str, **options: Any) -> Any:
    """The model without its LM head, as `transformers` runs it."""
    folder = folder_of(name, Kind.ENDS)
    return transformers.LlamaModel.from_pretrained(folder, dtype=torch.float32, **options)


def load_tokenizer(*_: object, **__: object) -> Any:
    """The model's tokenizer, whatever model the caller names."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
