"""Supported architectures: the names that config.json gives them, and the modules that define their classes."""

from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# The class has the architecture's name. Modules are imported on use: they import ModelConfig, which asks them to read
# its fields.
MODULES = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm4ForCausalLM": "llama",
    "Glm4MoeForCausalLM": "deepseek",
    "GlmForCausalLM": "llama",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "llama",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmo",
    "Phi3ForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_next",
    "Qwen3_5MoeForCausalLM": "qwen3_next",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_next",
    "SeedOssForCausalLM": "llama",
    "SmolLM3ForCausalLM": "llama",
}
# Encoders that `transformers` runs, for pooled requests.
ENCODERS = tuple(
    family + form
    for family in ("Bert", "Camembert", "ModernBert", "Roberta", "XLMRoberta")
    for form in ("Model", "ForSequenceClassification")
)
ADAPTER = "proa_engine.models.transformers_adapter"  # for all other architectures


class Form(Enum):
    """What is behind a decoder. The value is the end of the architecture's name."""

    CAUSAL_LM = "ForCausalLM"
    EMBEDDING = "Model"  # nothing
    CLASSIFIER = "ForSequenceClassification"
    REWARD = "ForRewardModel"  # two layers with one value for each token
    PROCESS_REWARD = "ForProcessRewardModel"  # two layers with two classes for each token


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Form]:
    """The first of `architectures`, of another form as that of the causal language model with the same decoder.

    Raises ValueError if it is not supported.
    """
    known = check_architecture(config)
    if known is not None:
        return known
    name = _first_architecture(config)
    if import_module(f"{ADAPTER}.fields").knows(name):
        return name, Form.CAUSAL_LM
    raise ValueError(_unsupported(name, f", {', '.join(ENCODERS)}, and the causal language models of transformers"))


def check_architecture(config: Mapping[str, Any]) -> tuple[str, Form] | None:
    """`architecture_of`, without importing transformers and torch: None if only transformers knows the answer."""
    name = _first_architecture(config)
    if name in MODULES:
        return name, Form.CAUSAL_LM
    for form in (Form.EMBEDDING, Form.CLASSIFIER, Form.REWARD, Form.PROCESS_REWARD):
        decoder = name.removesuffix(form.value) + Form.CAUSAL_LM.value
        if name.endswith(form.value) and decoder in MODULES:
            return decoder, form
    if find_spec("transformers") is None:
        raise ValueError(_unsupported(name, "; others need the extra: pip install 'proa-engine[transformers]'"))
    if is_encoder(name):
        return name, Form.CLASSIFIER if name.endswith(Form.CLASSIFIER.value) else Form.EMBEDDING
    return None


def _first_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ValueError(f"architectures in config.json must be a list with a name, got {names!r}")
    return str(names[0])


def _unsupported(name: str, others: str) -> str:
    return f"architecture {name} is not supported; supported: {', '.join(MODULES)}{others}"


def is_encoder(architecture: str) -> bool:
    """Whether attention is bidirectional, so that a prompt is computed in one step, and nothing is cached."""
    return architecture in ENCODERS


def is_adapted(architecture: str) -> bool:
    """Whether a model of this architecture is run by `transformers`."""
    return architecture not in MODULES


def model_class(architecture: str) -> Any:
    """Return the class of `architecture`, a name that `architecture_of` returned: a `config.ModelClass`."""
    if is_encoder(architecture):
        return import_module(f"{ADAPTER}.encoder").TransformersEncoder
    if is_adapted(architecture):
        return import_module(f"{ADAPTER}.model").TransformersForCausalLM
    return getattr(import_module(f"proa_engine.models.{MODULES[architecture]}"), architecture)


def standard_fields(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the fields that ModelConfig reads to those of a model that `transformers` runs. Raises ValueError, naming
    the field, for what is not supported."""
    added: dict[str, Any]
    if is_encoder(architecture):
        added = import_module(f"{ADAPTER}.encoder").encoder_fields(fields)
    else:
        added = import_module(f"{ADAPTER}.fields").standard_fields(fields)
    return added
