"""Apply a step's sampled tokens to its requests and make their `EngineCoreOutput`s."""

from collections.abc import Sequence
from itertools import compress

from proa.contract import EngineCoreOutput, EventType, TokenLogprobs
from proa_engine.core.request import Request
from proa_engine.core.types import ModelRunnerOutput

Logprobs = Sequence[TokenLogprobs]


def append_plain_tokens(
    requests: list[Request], result: ModelRunnerOutput
) -> tuple[list[Request], list[int], list[tuple[Request, Sequence[int]]]]:
    """Append the tokens of the rows in which one token is all that changes.

    Returns these rows' requests and tokens, and the other rows' requests, each with its tokens.
    """
    others: list[tuple[Request, Sequence[int]]] = []
    token_ids, sampled = result.plain_token_ids, result.sampled_token_ids
    if sampled:
        others = [(request, sampled[request.request_id]) for request in requests if request.request_id in sampled]
        requests = [request for request in requests if request.request_id not in sampled]
    is_done = [request.append_plain_token(token_id) for request, token_id in zip(requests, token_ids, strict=True)]
    if not all(is_done):
        rows = zip(requests, token_ids, is_done, strict=True)
        others += [(request, (token_id,)) for request, token_id, done in rows if not done]
        requests, token_ids = list(compress(requests, is_done)), list(compress(token_ids, is_done))
    return requests, token_ids, others


def append_tokens(request: Request, token_ids: Sequence[int], now: float) -> Sequence[int]:
    """Append sampled tokens to the request until it finishes. Returns all that were appended, forced ones included."""
    num_before = request.num_tokens
    for token_id in token_ids:
        if request.append_token(token_id):
            break
    new_ids = request.token_ids[num_before:]
    if new_ids and not request.has_output:
        request.has_output = True
        request.record(EventType.FIRST_TOKEN, now)
    return new_ids


def take_logprobs(request: Request, result: ModelRunnerOutput, num_tokens: int) -> tuple[Logprobs, Logprobs]:
    """The log probabilities of the request's `num_tokens` new tokens, and of its prompt tokens in this step."""
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()
    if result.logprobs:
        logprobs = result.logprobs.get(request.request_id, ())[:num_tokens]
    if result.prompt_logprobs:
        prompt_logprobs = _unsent(request, result.prompt_logprobs.get(request.request_id, ()))
    return logprobs, prompt_logprobs


def make_output(
    request: Request,
    new_token_ids: Sequence[int] = (),
    logprobs: Logprobs = (),
    prompt_logprobs: Logprobs = (),
) -> EngineCoreOutput:
    """Make the request's output of this step, with its events since the last one."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        client_index=request.client_index,
        new_token_ids=new_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
    )
    if logprobs or prompt_logprobs:
        output.logprobs, output.prompt_logprobs = logprobs, prompt_logprobs
    if request.events:
        output.events, request.events = request.events, []
        if request.is_finished:
            output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
            output.num_output_tokens = request.num_output_tokens
            output.error = request.error
    return output


def _unsent(request: Request, prompt_logprobs: Logprobs) -> Logprobs:
    """Drop the entries that were sent before the request was preempted and computed again."""
    request.num_prompt_logprobs_received += len(prompt_logprobs)
    num_new = request.num_prompt_logprobs_received - request.num_prompt_logprobs_sent
    if num_new <= 0:
        return ()
    request.num_prompt_logprobs_sent += num_new
    return prompt_logprobs[-num_new:]
