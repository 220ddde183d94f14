"""LLGuidanceGrammars: the compiler and the masks of one engine. Implements `core.grammar.Grammars`."""

from collections.abc import Callable, Iterable, Sequence

from proa.contract import EngineCoreRequest
from proa_engine.core.grammar import GrammarCursor, GrammarMasks, GrammarReady, MaskedSample
from proa_engine.grammar.builder import GrammarBuilder
from proa_engine.grammar.compiled import CACHE_BYTES, GrammarCache
from proa_engine.grammar.compiler import GrammarCompiler, QueueLimits
from proa_engine.grammar.masks import MakeBuffer, Masks
from proa_engine.grammar.stats import GrammarStats
from proa_engine.grammar.tokenizer import GrammarTokenizer


class LLGuidanceGrammars:
    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        eos_token_ids: Iterable[int],
        *,
        max_samples: int,
        make_buffer: MakeBuffer,
        num_threads: int,
        limits: QueueLimits,
        max_steps_in_flight: int = 2,
        max_bytes: int = CACHE_BYTES,
    ) -> None:
        """`make_buffer` returns writable memory of so many bytes, for masks, which `num_threads` fill. `limits` are of
        the compiler's queue. `max_samples` and `max_steps_in_flight` as in `Masks`. `max_bytes`: of compiled
        grammars."""
        self.stats = GrammarStats()
        self._compiler = GrammarCompiler(GrammarBuilder(tokenizer).build, self.stats, limits, GrammarCache(max_bytes))
        self._masks = Masks(
            tokenizer,
            eos_token_ids,
            max_samples=max_samples,
            make_buffer=make_buffer,
            num_threads=num_threads,
            stats=self.stats,
            max_steps_in_flight=max_steps_in_flight,
        )

    def prepare(
        self, request: EngineCoreRequest, ready: Callable[[GrammarReady], None], is_wanted: Callable[[], bool]
    ) -> GrammarCursor | None:
        return self._compiler.prepare(request, ready, is_wanted)

    def fill(self, samples: Sequence[MaskedSample]) -> GrammarMasks | None:
        return self._masks.fill(samples)

    def close(self) -> None:
        """End the threads. Requests whose grammars are not compiled yet are not answered."""
        self._compiler.close()
