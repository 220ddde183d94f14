"""The prompt of Qwen3-Reranker, a generative model that answers "yes" or "no": from its model card.

Yanzhao Zhang et al., "Qwen3 Embedding: Advancing Text Embedding and Reranking Through Foundation Models", 2025.
"""

from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer

from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.pooling.encoding import Limit, in_groups

_QUESTION = 'Note that the answer can only be "yes" or "no".'
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    f"provided. {_QUESTION}<|im_end|>\n<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_NAME = "qwen3-reranker"
_OPENING = "<|im_start|>"


def answers_yes_or_no(model: ServedModel) -> bool:
    """Whether the model judges documents so: its name or path says it, or its chat template has the same sentence."""
    names = f"{model.info.model} {model.info.model_name}".lower().replace("_", "-")
    return _NAME in names or _QUESTION in str(model.tokenizer.info.get("chat_template", ""))


def encode_prompts(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], instruction: str | None, limit: Limit
) -> list[Sequence[int]]:
    """The prompt of each pair. Only the query and the document are cut. A query that begins with the prompt's opening,
    as clients of vLLM send it, has the whole prompt already: its document is appended."""
    texts = [_text(query, document, instruction) for query, document in pairs]
    before, after = (each.ids for each in tokenizer.encode_batch_fast([_BEFORE, _AFTER], add_special_tokens=False))
    groups = in_groups(texts, len)
    encodings = (each for group in groups for each in tokenizer.encode_batch_fast(group, add_special_tokens=False))
    whole = [query.startswith(_OPENING) for query, _ in pairs]
    return [
        array("I", limit.cut(encoding.ids))
        if is_whole
        else array("I", [*before, *limit.cut(encoding.ids, len(before) + len(after)), *after])
        for encoding, is_whole in zip(encodings, whole, strict=True)
    ]


def _text(query: str, document: str, instruction: str | None) -> str:
    if query.startswith(_OPENING):
        return query + document
    return f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
