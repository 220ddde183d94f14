"""GrammarCache: what compiled grammars hold is bounded, for each tenant too, also while they grow."""

from llguidance import LLMatcher, LLTokenizer

from proa_engine.grammar.compiled import BASE_BYTES, BYTES_PER_SECOND, MASK_SECONDS, CompiledGrammar, GrammarCache
from support.tokenizers import byte_level_tokenizer

TOKENIZER = LLTokenizer(byte_level_tokenizer().to_str(), eos_token=0)
MB = 2**20
LIMIT = 10 * MB


def grammar(num_bytes: int = BASE_BYTES) -> CompiledGrammar:
    matcher = LLMatcher(TOKENIZER, 'start: "a"', log_level=0)
    return CompiledGrammar(matcher, (num_bytes - BASE_BYTES) / BYTES_PER_SECOND)


def filled(tenants: str) -> GrammarCache:
    """A cache with a grammar of 2 MB for each character, the tenant; its text is its number."""
    cache = GrammarCache(LIMIT)
    for number, tenant in enumerate(tenants):
        cache.add(str(number), tenant, grammar(2 * MB))
    return cache


def cached(cache: GrammarCache) -> list[int]:
    return [number for number in range(20) if cache.get(str(number)) is not None]


def test_a_tenant_with_many_grammars_evicts_its_own() -> None:
    assert cached(filled("aaaaaaaaa")) == [5, 6, 7, 8]
    assert cached(filled("baaaaaaaa")) == [0, 6, 7, 8]
    assert cached(filled("aabbaaaaaa")) == [2, 3, 8, 9]


def test_what_was_used_last_is_evicted_last() -> None:
    cache = filled("aaaa")
    assert cache.get("0") is not None
    cache.add("new", "a", grammar(2 * MB))
    assert cached(cache) == [0, 2, 3]


def test_a_grammar_that_grows_makes_others_go_and_is_compiled_anew() -> None:
    cache = filled("aaaa")
    growing = cache.get("3")
    assert isinstance(growing, CompiledGrammar)
    growing.count_masks(MASK_SECONDS + 5 * MB / BYTES_PER_SECOND)
    assert cached(cache) == [0, 1, 2]
    del growing
    cache.add("new", "b", grammar())
    assert cache.num_bytes <= LIMIT


def test_a_failed_grammar_is_compiled_anew() -> None:
    cache = filled("a")
    failed = cache.get("0")
    assert isinstance(failed, CompiledGrammar)
    failed.is_failed = True
    assert cache.get("0") is None


def test_grammars_in_use_count_until_their_requests_end() -> None:
    cache = filled("aaaa")
    running = [cache.get(str(number)) for number in range(4)]
    for number in range(4, 10):
        cache.add(str(number), "a", grammar(2 * MB))
    assert cache.num_bytes > LIMIT
    assert not cache.is_full, "others can be evicted"
    for each in running:
        assert isinstance(each, CompiledGrammar)
        each.count_masks(MASK_SECONDS + LIMIT / BYTES_PER_SECOND)
    assert cache.is_full
    each = None
    running.clear()
    assert not cache.is_full
    assert cache.num_bytes <= LIMIT
