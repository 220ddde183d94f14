"""Fields that the pooling endpoints refuse by name."""

from collections.abc import Mapping

from proa_gateway.openai.refused_fields import REFUSED as REFUSED_BY_ALL
from proa_gateway.openai.refused_fields import Refused

_ACTIVATION = Refused("use use_activation")
_COMMON: Mapping[str, Refused] = {
    **{name: REFUSED_BY_ALL[name] for name in ("mm_processor_kwargs", "media_io_kwargs")},
    "stream": Refused("there is one response"),
    "padding": Refused("inputs are not padded", neutral=("do_not_pad",)),
}
_INPUTS: Mapping[str, Refused] = {
    **_COMMON,
    "documents": Refused("use input"),
    "texts": Refused("use input"),
}
_LATE_CHUNKING = Refused("use /v1/embeddings")
REFUSED_IN_EMBEDDINGS: Mapping[str, Refused] = {
    **_INPUTS,
    "embedding_types": Refused("use encoding_format"),
    "output_dimension": Refused("use dimensions"),
    "input_type": Refused("write the task's prompt into the input"),
    "prompt_name": Refused("write the task's prompt into the input"),
}
REFUSED_IN_POOLING: Mapping[str, Refused] = {**REFUSED_IN_EMBEDDINGS, "late_chunking_params": _LATE_CHUNKING}
REFUSED_IN_COHERE_EMBED: Mapping[str, Refused] = {
    **_COMMON,
    "input": Refused("use texts"),
    "messages": Refused("use texts"),
    "images": Refused("only text is implemented"),
    "dimensions": Refused("use output_dimension"),
    "encoding_format": Refused("use embedding_types"),
    "truncate_prompt_tokens": Refused("use max_tokens"),
    "truncation_side": Refused("use truncate"),
}
REFUSED_IN_CLASSIFY: Mapping[str, Refused] = {
    **_INPUTS,
    "late_chunking_params": _LATE_CHUNKING,
    "softmax": _ACTIVATION,
    "activation": _ACTIVATION,
}
REFUSED_IN_SCORES: Mapping[str, Refused] = {
    **_COMMON,
    "softmax": _ACTIVATION,
    "activation": _ACTIVATION,
    "rank_fields": Refused("documents are texts"),
    "max_chunks_per_doc": Refused("a document is scored as a whole; use max_tokens_per_doc"),
    "overlap_tokens": Refused("a document is scored as a whole"),
}
