"""Which running requests a step may compute where the model is divided among pipeline stages.

While one step is on a stage, the next ones are on the stages before it. A request waits for its sampled token before it
computes it, so its decodes are in one step of as many as there are stages. The steps share the requests evenly.
"""

from collections.abc import Iterator, Sequence

from proa_engine.core.request import Request


def step_share(running: Sequence[Request], num_stages: int) -> Iterator[tuple[int, Request]]:
    """Yield the requests that the next step may compute, each with its index in `running`, in their order.

    These are all with a chunk of their prompt left, and of those with one token left as many as make an even share.
    Requests whose next token a step in flight samples are left out. `running` may lose requests at its end meanwhile.
    """
    num_left = -(-len(running) // num_stages)
    for index, request in enumerate(running):
        if request.num_placeholders:
            continue
        if request.num_uncomputed_tokens == 1:
            if not num_left:
                continue
            num_left -= 1
        yield index, request
