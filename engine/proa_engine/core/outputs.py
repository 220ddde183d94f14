"""Append a step's plain tokens to its requests, and make the `EngineCoreOutput`s of the others."""

from collections.abc import Sequence
from itertools import compress

from proa.contract import EngineCoreOutput, TokenLogprobs
from proa_engine.core.request import Request
from proa_engine.core.types import ModelRunnerOutput, RowOutput


def append_plain_tokens(
    requests: list[Request], result: ModelRunnerOutput
) -> tuple[list[Request], list[int], list[tuple[Request, RowOutput]]]:
    """Append the tokens of the rows whose only result is one token.

    Returns these rows' requests and tokens, and the other rows' requests and results.
    """
    others: list[tuple[Request, RowOutput]] = []
    token_ids, rows = result.plain_token_ids, result.others
    if rows:
        others = [(request, rows[request.request_id]) for request in requests if request.request_id in rows]
        requests = [request for request in requests if request.request_id not in rows]
    is_done = [request.append_plain_token(token_id) for request, token_id in zip(requests, token_ids, strict=True)]
    if not all(is_done):
        plain = zip(requests, token_ids, is_done, strict=True)
        others += [(request, RowOutput((token_id,))) for request, token_id, done in plain if not done]
        requests, token_ids = list(compress(requests, is_done)), list(compress(token_ids, is_done))
    return requests, token_ids, others


def make_output(request: Request, new_token_ids: Sequence[int] = ()) -> EngineCoreOutput:
    """Make the request's output of this step, with its events since the last one."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        client_index=request.client_index,
        new_token_ids=new_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        fetch=request.fetch,
        disk_read=request.disk_read,
        load=request.load,
    )
    if request.events:
        output.events, request.events = request.events, []
        if request.is_finished:
            output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
            output.num_output_tokens = request.num_output_tokens
            output.error = request.error
            if (pooled := request.pooled) is not None:
                output.pooled, output.num_pooled_rows = pooled.values, pooled.num_rows
    return output


def unsent_prompt_logprobs(request: Request, row: RowOutput) -> Sequence[TokenLogprobs]:
    """Return the row's prompt logprobs that were not sent before the request was preempted and computed again.

    With pipeline stages, steps from before the preemption may end after the request has started again.
    """
    num_new = row.prompt_logprobs_end - request.num_prompt_logprobs_sent
    if num_new <= 0:
        return ()
    request.num_prompt_logprobs_sent += num_new
    return row.prompt_logprobs[-num_new:]
