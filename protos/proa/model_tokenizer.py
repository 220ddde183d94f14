"""What gateway and engine share of a model's tokenizer: the tokenizer itself, its vocabulary and the chat templates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

from proa.chat_template import ChatTemplate, ModelTemplates, read_templates, special_tokens
from proa.text import Vocabulary
from proa.tokenizer_files import CHAT_TEMPLATE_FILE, load_tokenizer, read_object


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A model's tokenizer files, read."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    """For `proa.text.TextStream`."""
    config: Mapping[str, Any]
    """The fields of tokenizer_config.json."""
    templates: ModelTemplates
    added_tokens: Mapping[str, int]
    """Ids of the added tokens by text, for `proa.grammar`."""

    @classmethod
    def load(cls, files: Mapping[str, bytes]) -> Self:
        """Read the files by name. Takes up to seconds for large vocabularies. Raises `ValueError` for a file that
        is missing or wrong; for a chat template there is `templates.error`."""
        tokenizer = load_tokenizer(files)
        config = read_object(files, "tokenizer_config.json")
        templates = read_templates(config, files.get(CHAT_TEMPLATE_FILE))
        added = tokenizer.get_added_tokens_decoder()
        added_tokens = {token.content: token_id for token_id, token in added.items()}
        return cls(tokenizer, Vocabulary(tokenizer), config, templates, added_tokens)

    def compile_template(self, source: str) -> ChatTemplate:
        """A chat template that knows the model's special tokens. Raises `ChatTemplateError`."""
        return ChatTemplate(source, special_tokens=special_tokens(self.config))
