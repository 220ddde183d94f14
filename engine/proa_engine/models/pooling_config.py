"""PoolingConfig: which pooling tasks a model has, and how, from the files of its folder.

sentence-transformers lists the parts of a model in `modules.json`: the transformer, the pooling, and what follows it.
Raises ValueError, naming the part, for what the engine does not support.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from proa.contract import PoolingTask
from proa_engine.json_configs import PoolerConfig
from proa_engine.sources.folders import read_file, read_json

# sentence-transformers' names, and the older field that is true for each.
LEGACY_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
SPARSE_FILE = "sparse_linear.pt"  # of BGE-M3: a layer that gives each token a weight
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # classes of torch.nn


class PoolingKind(Enum):
    """Which of the prompt's hidden states make a result."""

    LAST = auto()  # the last token's
    FIRST = auto()
    MEAN = auto()
    ALL = auto()  # a row of the result for each


KINDS = {"cls": PoolingKind.FIRST, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
VLLM_KINDS = {"CLS": PoolingKind.FIRST, "MEAN": PoolingKind.MEAN, "LAST": PoolingKind.LAST}


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer behind the pooling, and its activation."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str  # of ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The default is a model without pooling tasks."""

    kinds: Mapping[PoolingTask, PoolingKind] = field(default_factory=dict)  # of the tasks that it has
    embedding_size: int = 0
    dense: tuple[DenseConfig, ...] = ()  # applied to embeddings, in order
    normalizes: bool = False  # embeddings, unless the request says otherwise
    labels: tuple[str, ...] = ()
    has_two_score_layers: bool = False  # behind a decoder: `score.0`, ReLU and `score.2`, instead of `score`
    is_multi_label: bool = False  # a label's probability does not depend on the others
    gives_probabilities: bool = True  # of labels, unless the request says otherwise
    max_tokens: int | None = None  # of a prompt; None: the model's positions
    head_tensors: tuple[str, ...] = ()  # of the model's own checkpoint that are not the model's, but those of `dense`
    sparse_files: tuple[Path, ...] = ()  # one, if classes of tokens are weights of a sparse embedding

    @property
    def last_token_tasks(self) -> frozenset[PoolingTask]:
        """The tasks that need the hidden state of the last token only."""
        return frozenset(task for task, kind in self.kinds.items() if kind is PoolingKind.LAST)

    @property
    def needs_sums(self) -> bool:
        """Whether hidden states of earlier chunks of a prompt must be kept."""
        return not {PoolingKind.FIRST, PoolingKind.MEAN}.isdisjoint(self.kinds.values())


@dataclass(frozen=True, slots=True)
class EmbeddingModules:
    """What `modules.json` lists behind the transformer."""

    kind: PoolingKind  # ALL: the model embeds tokens only, for late interaction (ColBERT)
    dense: tuple[DenseConfig, ...]
    normalizes: bool
    max_tokens: int | None
    head_tensors: tuple[str, ...] = ()  # see `PoolingConfig`
    sparse_files: tuple[Path, ...] = ()


def read_embedding_modules(folder: Path) -> EmbeddingModules | None:
    """Read `modules.json`. None if the folder has none, or if the model is not for embeddings."""
    path = folder / "modules.json"
    if (data := read_file(path)) is None:
        return None
    try:
        modules = sorted(json.loads(data), key=lambda module: int(module["idx"]))
        names = [str(module["type"]).rpartition(".")[2] for module in modules]
        folders = [folder / module["path"] for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a list of modules ({type(error).__name__}: {error})") from error
    if names[:2] == ["Transformer", "Dense"] and {*names[1:]} <= {"Dense", "Normalize"}:
        dense = [_read_dense(each) for each, name in zip(folders, names, strict=True) if name == "Dense"]
        # Modules that PyLate has saved, without a pooling: embeddings of tokens, of length 1.
        return EmbeddingModules(PoolingKind.ALL, tuple(dense), True, _max_tokens(folders[0]))
    if "Pooling" not in names:
        return None
    if names[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"the modules {', '.join(names)} are not supported; the first two must be Transformer, Pooling"
        )
    dense, normalizes = [], False
    for each, name in zip(folders[2:], names[2:], strict=True):
        if name == "Dense" and not normalizes:
            dense.append(_read_dense(each))
        elif name == "Normalize":
            normalizes = True
        else:
            raise ValueError(f"the module {name} of modules.json is not supported; supported: Dense, then Normalize")
    sparse_files = tuple(folder.glob(SPARSE_FILE))
    kind, max_tokens = _read_kind(_config(folders[1])), _max_tokens(folders[0])
    return EmbeddingModules(kind, tuple(dense), normalizes, max_tokens, sparse_files=sparse_files)


def colbert_modules(folder: Path, shape: Sequence[int]) -> EmbeddingModules:
    """Return the modules of a checkpoint of ColBERT's own code, which has its linear layer as `linear.weight` of
    `shape`."""
    dense = DenseConfig(folder, shape[1], shape[0], False, "Identity")
    return EmbeddingModules(PoolingKind.ALL, (dense,), True, None, head_tensors=("linear.weight",))


def embedding_config(modules: EmbeddingModules | None, hidden_size: int, kind: PoolingKind) -> PoolingConfig:
    """Return the configuration of a model that computes embeddings. `modules` None: pooled as `kind` says, of length
    1."""
    if modules is None:
        modules = EmbeddingModules(kind, (), True, None)
    kinds = {PoolingTask.EMBED: modules.kind, PoolingTask.TOKEN_EMBED: PoolingKind.ALL}
    if modules.kind is PoolingKind.ALL:
        del kinds[PoolingTask.EMBED]
    if modules.sparse_files:
        kinds[PoolingTask.TOKEN_CLASSIFY] = PoolingKind.ALL
    return PoolingConfig(
        kinds=kinds,
        head_tensors=modules.head_tensors,
        embedding_size=modules.dense[-1].out_features if modules.dense else hidden_size,
        dense=modules.dense,
        normalizes=modules.normalizes,
        max_tokens=modules.max_tokens,
        sparse_files=modules.sparse_files,
    )


def classification_config(config: Mapping[str, Any], kind: PoolingKind) -> PoolingConfig:
    """Return the configuration of a model with a classification head. `config`: its config.json."""
    labels = _labels(config)
    problem = config.get("problem_type")
    activation = (config.get("sentence_transformers") or {}).get("activation_fn")
    activation = str(activation or config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if activation not in ("", "Identity", "Sigmoid", "Softmax"):
        raise ValueError(f"the activation {activation} of labels is not supported")
    kinds = {PoolingTask.CLASSIFY: kind}
    if kind is PoolingKind.LAST:  # what the model says of the prompt up to each token; other heads need all of it
        kinds[PoolingTask.TOKEN_CLASSIFY] = PoolingKind.ALL
    return PoolingConfig(
        kinds=kinds,
        labels=labels,
        is_multi_label=len(labels) == 1 or problem == "multi_label_classification" or activation == "Sigmoid",
        gives_probabilities=activation != "Identity" and problem != "regression",
    )


def reward_config(num_labels: int) -> PoolingConfig:
    """Return the configuration of a decoder that judges each token of a solution, such as those that end its steps."""
    return PoolingConfig(
        kinds={PoolingTask.TOKEN_CLASSIFY: PoolingKind.ALL},
        labels=tuple(f"LABEL_{index}" for index in range(num_labels)),
        has_two_score_layers=True,
        is_multi_label=num_labels == 1,
    )


def changed_pooling(pooling: PoolingConfig, user: PoolerConfig) -> PoolingConfig:
    """Raises ValueError for a task that the model does not have."""
    kinds = dict(pooling.kinds)
    for task in (PoolingTask.EMBED, PoolingTask.CLASSIFY):
        if user.pooling_type is not None and task in kinds:
            kinds[task] = VLLM_KINDS[user.pooling_type]
    if user.task is not None:
        named = PoolingTask[user.task.upper()]
        if named not in kinds:
            has = ", ".join(task.name.lower() for task in kinds) or "none"
            raise ValueError(f"pooler_config: the model does not have the task {user.task}; its tasks: {has}")
        kinds = {named: kinds[named]}
    if user.use_activation is not None:
        pooling = replace(pooling, normalizes=user.use_activation, gives_probabilities=user.use_activation)
    return replace(pooling, kinds=kinds)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    count = len(names) or int(config.get("num_labels") or 2)
    return tuple(names.get(index, f"LABEL_{index}") for index in range(count))


def _read_kind(config: Mapping[str, Any]) -> PoolingKind:
    modes = config.get("pooling_mode") or [mode for name, mode in LEGACY_FIELDS.items() if config.get(name)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in KINDS:
        raise ValueError(f"the pooling mode {'+'.join(modes)} is not supported; supported: {', '.join(KINDS)}")
    if not config.get("include_prompt", True):
        raise ValueError("include_prompt false is not supported in the configuration of the pooling")
    return KINDS[modes[0]]


def _read_dense(folder: Path) -> DenseConfig:
    config = _config(folder)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ValueError(f"the activation {activation} of {folder.name} is not supported")
    inputs = config.get("module_input_name", "sentence_embedding")
    if config.get("use_residual") or inputs != "sentence_embedding":
        raise ValueError(f"use_residual and module_input_name of {folder.name} are not supported")
    return DenseConfig(folder, config["in_features"], config["out_features"], config.get("bias", True), activation)


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of a module that `modules.json` lists."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder}, a module of modules.json, has no config.json; was it copied or downloaded?")
    return config


def _max_tokens(folder: Path) -> int | None:
    length = (read_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return None if length is None else int(length)
