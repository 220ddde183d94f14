"""Configurations that a user gives as JSON: of the model's pooling, and of draft tokens. Names are vLLM's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final, Literal, Self

from proa.tokenizer_files import SAMPLING_DEFAULTS

TASKS: Final = ("embed", "token_embed", "classify", "token_classify")
POOLING_TYPES: Final = ("CLS", "LAST", "MEAN")
METHODS = ("ngram", "eagle3", "mtp", "dflash", "dspark")
BLOCK_METHODS = ("dflash", "dspark")
_WITH_MODEL = ("eagle3", *BLOCK_METHODS)  # whose drafter is no part of the model
SAMPLE_METHODS = ("auto", "greedy", "probabilistic")
MAX_SPECULATIVE_TOKENS = 32
_DEFAULT_TOKENS = 3
MAX_NGRAM = 16
_LARGEST: Mapping[str, int] = {
    "num_speculative_tokens": MAX_SPECULATIVE_TOKENS,
    "prompt_lookup_max": MAX_NGRAM,
    "prompt_lookup_min": MAX_NGRAM,
}
# Fields of vLLM's speculative_config that change nothing here.
_WITHOUT_EFFECT = frozenset(("disable_eagle_block_drop", "disable_padded_drafter_batch"))
# Those that have one value here, with others that mean the same, and why they have no other.
_FIXED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "parallel_drafting": ((False, None), "its method says whether a drafter proposes its tokens at once"),
    "rejection_sample_method": (
        ("standard",),
        "a draft token is accepted where it is the model's own sample, so that outputs are those without drafts",
    ),
    "speculative_token_tree": ((None,), "draft tokens are a sequence and no tree"),
    "use_heterogeneous_vocab": ((False, None), "the drafter has the model's vocabulary, or a part of it"),
}
_EAGLE3 = "take an EAGLE-3 head of the model (eagle3)"
# vLLM's other methods, and why they are refused.
_REFUSED_METHODS: Mapping[str, str] = {
    "custom_class": "code of users is not run",
    "draft_model": "a drafter's layers read hidden states of the model",
    "eagle": _EAGLE3,
    "extract_hidden_states": "it is no speculation",
    "medusa": _EAGLE3,
    "mlp_speculator": _EAGLE3,
    "ngram_gpu": "take ngram, which runs on the model's device",
    "suffix": "take ngram, which needs no library",
}


class JsonConfig:
    """The base of frozen dataclasses. Their constructors raise `ValueError` naming the field that is wrong."""

    __slots__ = ()
    NAME: ClassVar[str]  # of the option

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Raises `ValueError`, also for an unknown or missing name."""
        assert is_dataclass(cls)
        known, values = fields(cls), cls._renamed(values)
        if unknown := sorted(set(values) - {field.name for field in known}):
            names = ", ".join(field.name for field in known)
            raise ValueError(f"{cls.NAME} has no field {unknown[0]!r}; its fields are {names}")
        for field in known:
            if field.default is MISSING and field.name not in values:
                raise ValueError(f"{cls.NAME} must name {field.name}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a JSON object. Raises `ValueError` as `from_mapping` does."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{cls.NAME} must be JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{cls.NAME} must be a JSON object, got {text}")
        return cls.from_mapping(values)

    @classmethod
    def _renamed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`values` with second names of fields replaced by the first ones, without fields that have no effect."""
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig(JsonConfig):
    """What the user changes of a model's pooling. None: as the model's files say."""

    NAME = "pooler_config"
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None  # the only one of the engine
    pooling_type: Literal["CLS", "LAST", "MEAN"] | None = None  # of `embed` and `classify`
    use_activation: bool | None = None  # embeddings get length 1, labels become probabilities
    enable_chunked_processing: bool = False  # inputs to embed that are too long for the model are embedded in parts
    max_embed_len: int | None = None  # maximum tokens of such an input

    def __post_init__(self) -> None:
        for name, choices in (("task", TASKS), ("pooling_type", POOLING_TYPES)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("use_activation", "enable_chunked_processing"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        length = self.max_embed_len
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or not 0 < length < 2**31):
            raise ValueError(f"max_embed_len must be an integer above 0, got {length!r}")
        if self.enable_chunked_processing != (length is not None):
            raise ValueError("enable_chunked_processing and max_embed_len need each other")

    @classmethod
    def _renamed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`seq_pooling_type` is `pooling_type` too."""
        if "seq_pooling_type" not in values:
            return values
        if "pooling_type" in values:
            raise ValueError("pooler_config must have one of pooling_type and seq_pooling_type")
        return {"pooling_type" if name == "seq_pooling_type" else name: value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(JsonConfig):
    """Which draft tokens a step verifies.

    `ngram`: find the request's last tokens earlier in it, as many as possible, and draft the tokens that followed their
    latest occurrence. `eagle3`: those that a layer proposes which reads hidden states of the model. `mtp`: the same
    with a layer of the model's own checkpoint. `dflash`, `dspark`: those of layers that read hidden states and propose
    a block of tokens at once.
    """

    NAME = "speculative_config"
    method: Literal["ngram", "eagle3", "mtp", "dflash", "dspark"]
    num_speculative_tokens: int | None = None  # maximum in one step; None: see `max_drafts`
    # [first, last, drafts] by number of running requests, in place of the number that is measured to be best. Between
    # two ranges the earlier one counts, as behind the last.
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None = None
    model: str = ""  # of a drafter: its folder, id or URL, as --model; builtin: the built-in model's drafter
    revision: str | None = None  # of `model` on the hub
    quantization: str | None = None  # of `model`, as the model's
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"  # how `model` draws: see core/speculation
    draft_tensor_parallel_size: int | None = None  # the model's; None: the same
    prompt_lookup_max: int = 5  # maximum length of the n-gram looked up
    prompt_lookup_min: int = 1  # minimum length of the n-gram looked up

    def __post_init__(self) -> None:
        if reason := _REFUSED_METHODS.get(self.method):
            raise ValueError(f"method {self.method} is not supported: {reason}; supported: {', '.join(METHODS)}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method}")
        for name in ("model", "revision", "quantization"):
            value = getattr(self, name)
            if value and self.method == "ngram":
                raise ValueError(f"{name} has no effect with method ngram, which has no drafter; remove it")
            if not isinstance(value, str | None):
                raise ValueError(f"{name} must be a string, got {value!r}")
        if self.method in _WITH_MODEL and not self.model:
            raise ValueError(f"method {self.method} needs model, the folder or the hub id of the drafter")
        if self.draft_sample_method not in SAMPLE_METHODS:
            known = ", ".join(SAMPLE_METHODS)
            raise ValueError(f"draft_sample_method must be one of {known}, got {self.draft_sample_method!r}")
        for field in fields(self):
            value, most = getattr(self, field.name), _LARGEST.get(field.name, 0)
            if most and value is not field.default and (type(value) is not int or not 1 <= value <= most):
                raise ValueError(f"{field.name} must be an integer from 1 to {most}, got {value!r}")
        if self.num_speculative_tokens_per_batch_size is not None:
            _check_schedule(self.num_speculative_tokens_per_batch_size)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )

    @classmethod
    def _renamed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`values` without fields of vLLM that have no choice here, and with one name for `mtp`, which it names by
        family."""
        for name, (fixed, reason) in _FIXED.items():
            if name in values and values[name] not in fixed:
                raise ValueError(f"{name} {values[name]!r} is not supported: {reason}")
        kept = {name: value for name, value in values.items() if name not in _FIXED and name not in _WITHOUT_EFFECT}
        return kept | {"method": "mtp"} if str(kept.get("method")).endswith("_mtp") else kept

    @property
    def max_drafts(self) -> int:
        """Maximum draft tokens in one step. Without `num_speculative_tokens`, drafters have the number that follows
        from their checkpoint, once `with_draft_number` has read it."""
        return self.num_speculative_tokens or _DEFAULT_TOKENS

    @property
    def schedule(self) -> tuple[tuple[int, int], ...]:
        """The first number of requests of each range, ascending from 1, and its draft tokens; empty: measured."""
        ranges = self.num_speculative_tokens_per_batch_size or ()
        return tuple((first, min(drafts, self.max_drafts)) for first, _, drafts in ranges)

    @property
    def reads_states(self) -> bool:
        """Whether draft tokens come from layers that read the model's hidden states."""
        return self.method != "ngram"


def _check_schedule(ranges: Sequence[Sequence[int]]) -> None:
    name, form = "num_speculative_tokens_per_batch_size", "[first, last, drafts]"
    if not isinstance(ranges, list | tuple) or not ranges:
        raise ValueError(f"{name} must be a list of ranges {form}, got {ranges!r}")
    end = 0
    for each in ranges:
        if not isinstance(each, list | tuple) or len(each) != 3 or not all(type(value) is int for value in each):
            raise ValueError(f"{name} must have ranges {form} of integers, got {each!r}")
        first, last, drafts = each
        if not end and first != 1:
            raise ValueError(f"{name} must begin with 1 request, got {first}")
        if first <= end or last < first:
            raise ValueError(f"{name} must have ascending ranges that do not overlap, got {list(ranges)!r}")
        if drafts < 0:
            raise ValueError(f"{name} must have at least 0 draft tokens, got {drafts}")
        end = last


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def check_sampling_defaults(values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a name in override_generation_config that is no sampling parameter with a default of the
    model's, or for a value that is no number."""
    for name, value in values.items():
        if name not in SAMPLING_DEFAULTS:
            raise ValueError(f"override_generation_config cannot change {name}, only {', '.join(SAMPLING_DEFAULTS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} of override_generation_config must be a number, got {value!r}")
