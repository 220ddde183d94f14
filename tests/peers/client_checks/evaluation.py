"""lm-eval: log likelihoods of completions, and generated chats."""

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def check_loglikelihood(url: str, model: str) -> None:
    api = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=model, tokenizer_backend="remote", tokenized_requests=False
    )
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " London")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    (right, _), (wrong, _) = api.loglikelihood(requests)
    assert wrong < 0
    assert right < 0


def check_generate_chat(url: str, model: str) -> None:
    api = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model=model)
    prompt = api.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    request = Instance("generate_until", {}, (prompt, {"until": ["\n"], "max_gen_toks": 20}), 0)
    assert "Paris" in api.generate_until([request])[0]
