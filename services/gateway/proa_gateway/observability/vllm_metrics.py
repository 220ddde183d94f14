"""vLLM's metrics of requests, for users whose Prometheus scrapes only the gateway. Updated when a request has ended."""

from prometheus_client import CollectorRegistry, Counter, Histogram

# Seconds. Buckets start at 1 ms, the time of a short decode step.
REQUEST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
FIRST_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
PER_TOKEN_BUCKETS = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
COUNT_BUCKETS = tuple(2.0**exponent for exponent in range(18))  # numbers of tokens
CHOICE_BUCKETS = (1, 2, 5, 10, 20)

_FINISHES = {"client_disconnected": "abort"}
"""Reasons that vLLM calls otherwise."""


class VllmMetrics:
    """Times are in seconds. The label `engine` is the engines': a request may have had several."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, ("model_name",), registry=registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ("model_name", *labels), registry=registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = counter("generation_tokens", "Output tokens of ended requests.")
        self._success = counter("request_success", "Ended output sequences, by reason.", "finished_reason")
        text = "Time from a request's arrival at the gateway to its first token."
        self._first_token = histogram("time_to_first_token_seconds", text, FIRST_TOKEN_BUCKETS)
        text = "Mean time per token of a request, without its first token."
        self._per_token = histogram("request_time_per_output_token_seconds", text, PER_TOKEN_BUCKETS)
        text = "Time from a request's arrival at the gateway to its end."
        self._latency = histogram("e2e_request_latency_seconds", text, REQUEST_BUCKETS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._request_output = histogram("request_generation_tokens", "Output tokens of a request.", COUNT_BUCKETS)
        text = "Output tokens of the longest sequence of a request."
        self._longest_output = histogram("request_max_num_generation_tokens", text, COUNT_BUCKETS)
        self._choices = histogram("request_params_n", "The parameter n.", CHOICE_BUCKETS)
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", COUNT_BUCKETS)

    def observe_finish(self, model: str, reason: str, count: int) -> None:
        self._success.labels(model, _FINISHES.get(reason, reason)).inc(count)

    def observe_tokens(self, model: str, *, input_tokens: int, output_tokens: int) -> None:
        """Count the tokens of a request that has ended, however it did."""
        self._prompt_tokens.labels(model).inc(input_tokens)
        self._generation_tokens.labels(model).inc(output_tokens)

    def observe_success(
        self,
        model: str,
        *,
        duration: float,
        time_to_first_token: float,
        time_per_output_token: float | None,
        input_tokens: int,
        output_tokens: int,
        longest_output: int,
        num_choices: int,
        max_tokens: int | None,
    ) -> None:
        """Observe a request that was successful. None: it has no such value."""
        self._first_token.labels(model).observe(time_to_first_token)
        self._latency.labels(model).observe(duration)
        if time_per_output_token is not None:
            self._per_token.labels(model).observe(time_per_output_token)
        self._request_prompt.labels(model).observe(input_tokens)
        self._request_output.labels(model).observe(output_tokens)
        self._longest_output.labels(model).observe(longest_output)
        self._choices.labels(model).observe(num_choices)
        if max_tokens is not None:
            self._max_tokens.labels(model).observe(max_tokens)
