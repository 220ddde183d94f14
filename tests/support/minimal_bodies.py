"""The smallest valid body of each route that takes one, without the model. Tests of all routes vary them."""

from typing import Any

MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 5},
    "/v1/completions": {"prompt": "Hi"},
    "/invocations": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 16}},
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"]},
    "/classify": {"input": "Hi"},
    "/v1/score": {"documents": "Ho", "queries": "Hi"},
    "/v2/rerank": {"documents": ["Ho"], "query": "Hi"},
    "/generative_scoring": {"items": ["Ho"], "query": "Hi", "label_token_ids": [5]},
    "/v1/decisions": {"input": "Hi", "questions": [{"type": "predicate", "instructions": "Ho"}]},
    "/v1/systemone": {"state": "Hi", "questions": {"a": {"type": "noul", "instructions": "Ho"}}},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
"""The first field of each is the one that has the text."""

ALIASES = {"/score": "/v1/score", "/v1/rerank": "/v2/rerank", "/rerank": "/v2/rerank"}
"""The route with the same handler, by route."""
