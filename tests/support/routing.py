"""Cached tokens of a request: as expected by the gateway when it chose the engine, and as reported by the engine."""

from collections.abc import Sequence
from typing import Any

from support.gateway import RunningGateway, until
from support.scrape import Scrape

HITS = "proa_gateway_routed_cache_hit_tokens_total"


async def cached_tokens(gateway: RunningGateway, token_ids: Sequence[int], **fields: Any) -> tuple[int, int]:
    """Send a prompt to the gateway's only model. Return its cached tokens, as expected and as reported."""
    before = await _hits(gateway)
    body = {"prompt": token_ids, "max_tokens": 2, "ignore_eos": True, **fields}
    answer = await gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    after = await _hits(gateway)
    expected, reported = (round(after[by] - before[by]) for by in ("gateway", "engine"))
    assert reported == answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return expected, reported


async def in_sync(gateways: Sequence[RunningGateway]) -> None:
    """Wait until the gateways have received all KV events: nothing is pending, and all indexes have equal size."""
    indexes = [gateway.gateway.router.index.device for gateway in gateways]
    await until(lambda: all(not one.has_pending and one.num_blocks == indexes[0].num_blocks for one in indexes))


async def _hits(gateway: RunningGateway) -> dict[str, float]:
    page = Scrape((await gateway.http.get("/metrics")).text)
    return {by: page.value(HITS, by=by) if HITS in page.names else 0.0 for by in ("gateway", "engine")}
