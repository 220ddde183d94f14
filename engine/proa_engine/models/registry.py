"""Supported architectures: the names that config.json gives them, and the modules or plugins that define their
classes."""

from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from typing import Any

from proa.plugins import Group, Plugin, plugins_of
from proa_engine.models.transformers_names import causal_lm_names, has_transformers

# The class has the architecture's name. Modules are imported on use: they import ModelConfig, which asks them to read
# its fields.
MODULES = {
    "BaiChuanForCausalLM": "renamed",
    "BaichuanForCausalLM": "renamed",
    "ChatGLMForConditionalGeneration": "renamed",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "ExaoneForCausalLM": "renamed",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm4ForCausalLM": "llama",
    "Glm4MoeForCausalLM": "deepseek",
    "GlmForCausalLM": "llama",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "InternLM2ForCausalLM": "renamed",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "LlamaForCausalLM": "llama",
    "MiMoForCausalLM": "qwen",
    "MiniCPMForCausalLM": "granite",
    "Ministral3ForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmo",
    "OrionForCausalLM": "renamed",
    "Phi3ForCausalLM": "llama",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl",
    "Qwen3_5ForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_next",
    "Qwen3_5MoeForCausalLM": "qwen3_next",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_next",
    "SeedOssForCausalLM": "llama",
    "SmolLM3ForCausalLM": "llama",
    "WhisperForConditionalGeneration": "whisper",
}
# Further names of Llama, whose checkpoints differ from its in nothing but the biases of attention.
NAMES_OF_LLAMA = ("AquilaForCausalLM", "AquilaModel", "InternLMForCausalLM", "LLaMAForCausalLM", "XverseForCausalLM")
OTHER_NAMES = dict.fromkeys(NAMES_OF_LLAMA, "LlamaForCausalLM") | {"ChatGLMModel": "ChatGLMForConditionalGeneration"}
REQUIRED_FIELDS = ("hidden_size", "num_hidden_layers")  # that all of them read, without a default
# Encoders that `transformers` runs, for pooled requests.
ENCODERS = (
    *(
        family + form
        for family in ("Bert", "Camembert", "ModernBert", "Roberta", "XLMRoberta")
        for form in ("Model", "ForSequenceClassification")
    ),
    "Gemma3TextModel",  # EmbeddingGemma; one with causal attention is found not to be an encoder when it is tried
)
COLBERT, COLBERT_ENCODER = "HF_ColBERT", "BertModel"  # of ColBERT's own code, with a linear layer behind
ADAPTER = "proa_engine.models.transformers_adapter"  # for all other architectures
_MAX_NAME = 100  # characters that are compared, as comparing a megabyte with each known name takes a second


class Form(Enum):
    """What is behind a decoder. The value is the end of the architecture's name."""

    CAUSAL_LM = "ForCausalLM"
    EMBEDDING = "Model"  # nothing
    CLASSIFIER = "ForSequenceClassification"
    REWARD = "ForRewardModel"  # two layers with one value for each token
    PROCESS_REWARD = "ForProcessRewardModel"  # two layers with two classes for each token


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Form]:
    """The first of `architectures`, of another form as that of the causal language model with the same decoder.

    Raises ValueError if it is not supported, or if two packages add one architecture. Does not import torch.
    """
    name, known = _first_architecture(config), {*MODULES, *_plugins()}
    if name in OTHER_NAMES:
        return OTHER_NAMES[name], Form.CAUSAL_LM
    if name in known:
        return name, Form.CAUSAL_LM
    for form in (Form.EMBEDDING, Form.CLASSIFIER, Form.REWARD, Form.PROCESS_REWARD):
        decoder = name.removesuffix(form.value) + Form.CAUSAL_LM.value
        if name.endswith(form.value) and decoder in known:
            return decoder, form
    if name == COLBERT:
        return architecture_of({"architectures": [COLBERT_ENCODER]})
    if is_encoder(name) and has_transformers():
        return name, Form.CLASSIFIER if name.endswith(Form.CLASSIFIER.value) else Form.EMBEDDING
    if has_transformers() and name in causal_lm_names():
        return name, Form.CAUSAL_LM
    raise ValueError(_unsupported(name, config))


def _first_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ValueError(f"architectures in config.json must be a list with a name, got {names!r}")
    return str(names[0])


def _unsupported(name: str, config: Mapping[str, Any]) -> str:
    text = f"architecture {name} is not supported"
    if config.get("auto_map"):
        text += (
            ": its code is in the model's folder (auto_map in config.json), and code of checkpoints is never run; take "
            "a version of the model for transformers' own code, or install a package that adds the architecture "
            "(docs/plugins.md)"
        )
    elif similar := _similar(name):
        text += f" (did you mean {similar}?)"
    if not has_transformers():
        text += "; others need the extra: pip install 'proa-engine[transformers]'"
    return f"{text}; docs/models.md lists what is supported"


def _similar(name: str) -> str | None:
    """The architecture with the most similar family, because the ends of all names are alike."""
    known = {each.partition("For")[0]: each for each in (*ENCODERS, *MODULES, *_plugins())}
    close = get_close_matches(name.partition("For")[0][:_MAX_NAME], known, n=1, cutoff=0.8)
    return known[close[0]] if close else None


def _plugins() -> dict[str, Plugin]:
    return plugins_of(Group.MODELS, built_in={*MODULES, *OTHER_NAMES, *ENCODERS, COLBERT})


def is_encoder(architecture: str) -> bool:
    """Whether attention is bidirectional, so that a prompt is computed in one step, and nothing is cached."""
    return architecture in ENCODERS


def is_adapted(architecture: str) -> bool:
    """Whether a model of this architecture is run by `transformers`."""
    return architecture not in MODULES and architecture not in _plugins()


def model_class(architecture: str) -> Any:
    """Return the class of `architecture`, a name that `architecture_of` returned: a `config.ModelClass`. Raises
    ValueError, naming the package, if it is of a plugin that cannot be imported."""
    if is_encoder(architecture):
        return import_module(f"{ADAPTER}.encoder").TransformersEncoder
    if is_adapted(architecture):
        return import_module(f"{ADAPTER}.model").TransformersForCausalLM
    if architecture in MODULES:
        return getattr(import_module(f"proa_engine.models.families.{MODULES[architecture]}"), architecture)
    plugin, base = _plugins()[architecture], import_module("proa_engine.models.decoder").DecoderForCausalLM
    loaded = plugin.load()
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise plugin.of_wrong_kind(f"a class derived from {base.__module__}.{base.__name__}")
    return loaded


def standard_fields(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the fields that ModelConfig reads to those of a model that `transformers` runs. Raises ValueError, naming
    the field, for what is not supported."""
    added: dict[str, Any]
    if is_encoder(architecture):
        added = import_module(f"{ADAPTER}.encoder").encoder_fields(fields)
    else:
        added = import_module(f"{ADAPTER}.fields").standard_fields(fields)
    return added
