"""How the byte-level tokenizers of known models divide a text, by the names that llama.cpp gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from proa.tokenizer_formats.build import Division

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_CASES: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN: Final = rf"{_CASES}|{_UPPER_CASES}|\p{{N}}|{_REST_WITH_SLASHES}"
_GPT4O: Final = rf"{_CASES}{_CONTRACTIONS}?|{_UPPER_CASES}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_NFC: Final = {"type": "NFC"}


@dataclass(frozen=True, slots=True)
class Preset:
    """`ignore_merges` as in `build.byte_level_bpe`. `adds_first`: the first token comes before each text, if the file
    does not say whether it does."""

    division: Division
    ignore_merges: bool = False
    adds_first: bool = False


_GPT2 = Preset(Division(gpt2_pattern=True))
_BY_DIGIT = Preset(Division(gpt2_pattern=True, by_digit=True))
_LLAMA3 = Preset(Division((LLAMA3,)), ignore_merges=True, adds_first=True)
_QWEN2 = Preset(Division((QWEN2,), normalizer=_NFC))
PRESETS: Final[Mapping[str, Preset]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "mellum", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Preset(Division((LLAMA3,)))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": Preset(Division((_QWEN35,), normalizer=_NFC)),
    "tekken": Preset(Division((TEKKEN,)), ignore_merges=True, adds_first=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Preset(Division((_GPT4O,)), ignore_merges=True)),
    "deepseek-v3": Preset(Division(_DEEPSEEK_V3)),
}
