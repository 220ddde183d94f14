"""The model that vLLM's tests get in place of the one they name: the built-in one, with a chat template for tools.

The model does not call tools unless a grammar makes it. By the calls and the reasoning in the template the gateway
chooses the hermes format, which most models that the tests name have.
"""

import json
import shutil
from pathlib import Path

import transformers

BUILTIN = Path(__file__).parents[2] / "engine" / "proa_engine" / "builtin" / "model"
FOLDER = Path("model")  # below the folder in which the tests run
CONTEXT = 8192  # tokens: the longest that a test needs
CHAT_TEMPLATE = """{{ '<|begin|>' }}
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{{- '<|' ~ (message.role if message.role in ['system', 'user', 'assistant'] else 'user') ~ '|>' }}
{{- (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' ~ ('<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}"""


class ModelConfig:
    """What the tests use of vLLM's class."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def get_vocab_size(self) -> int:
        size: int = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
        return size


def write_model() -> None:
    """Write the model to `FOLDER`."""
    shutil.copytree(BUILTIN, FOLDER)
    _change("tokenizer_config.json", chat_template=CHAT_TEMPLATE, model_max_length=CONTEXT)
    _change("config.json", max_position_embeddings=CONTEXT)


def _change(file: str, **values: object) -> None:
    path = FOLDER / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load_tokenizer(*_: object, **__: object) -> object:
    """The model's tokenizer, whatever model the caller names."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
