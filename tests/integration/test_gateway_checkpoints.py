"""Engines whose hits end at checkpoints: the cached tokens that the gateway expects are those that they report."""

from proa.engine.v1 import service_pb2
from support.fake_engine import FakeEngine
from support.gateway import running_gateway, until
from support.routing import cached_tokens

RULE = service_pb2.CheckpointRule(interval=512, min_junction=256)
SHARED = [7] * 300


async def test_a_shared_prefix_is_reused_from_its_third_request_on() -> None:
    async with FakeEngine(checkpoint_rule=RULE) as engine, running_gateway(engine) as gateway:
        await engine.until(lambda fake: fake.num_kv_subscriptions == 1)
        hits = [await cached_tokens(gateway, [*SHARED, *range(number, number + 50)]) for number in range(10, 50, 10)]
        assert hits == [(0, 0), (0, 0), (288, 288), (288, 288)]
        assert await cached_tokens(gateway, [*SHARED, *range(10, 60)]) == (336, 336), "up to the prompt's end"
        assert await cached_tokens(gateway, SHARED[:200]) == (0, 0), "no checkpoint in it"


async def test_an_answer_is_reused_by_the_next_turn() -> None:
    async with FakeEngine(checkpoint_rule=RULE) as engine, running_gateway(engine) as gateway:
        index = gateway.gateway.router.index.device
        prompt = list(range(1, 48))
        assert await cached_tokens(gateway, prompt) == (0, 0)
        cache = engine.prefix_cache
        assert cache is not None
        assert cache.hit([*prompt, *prompt[:3]]) == (48, 48)
        await until(lambda: index.match(list(cache.blocks)) == [(3, [engine.address])])
        assert await cached_tokens(gateway, [*prompt, *prompt[:3]]) == (48, 48)


async def test_a_removed_checkpoint_is_not_expected() -> None:
    async with FakeEngine(checkpoint_rule=RULE) as engine, running_gateway(engine) as gateway:
        index = gateway.gateway.router.index.device
        long = list(range(1, 500)) + list(range(1, 500))
        assert await cached_tokens(gateway, long) == (0, 0)
        await until(lambda: not index.has_pending)
        cache = engine.prefix_cache
        assert cache is not None
        blocks = list(cache.blocks)[: (len(long) - 1) // 16]
        cache.evict(checkpoints=[blocks[-1]])
        await until(lambda: index.count_cached(engine.address, blocks) == 32)
        assert await cached_tokens(gateway, long) == (512, 512), "the interval's checkpoint is left"
