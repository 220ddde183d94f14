"""The host tier of an engine without host memory for its cache: nothing is stored, and no request waits for a load."""

from collections.abc import Iterable, Sequence

from proa_engine.core.kv.mover import Adopted
from proa_engine.core.kv_events import NO_KV_EVENTS
from proa_engine.core.request import Request
from proa_engine.core.types import NO_COPIES, Block, Copies


class NoLoads:
    def held(self, block_hashes: Iterable[bytes]) -> tuple[int, int]:
        return 0, 0

    def begin(self, request: Request, num_hit: int) -> int:
        return 0

    def take_ended(self) -> Sequence[Request]:
        return ()

    def end(self, request: Request) -> None: ...

    def give_up(self, first: Request | None = None) -> bool:
        return False


class NoStores:
    def add_blocks(self, blocks: Iterable[tuple[bytes, Block]]) -> None: ...

    def add_checkpoint(self, checkpoint_hash: bytes) -> None: ...


class NoHostTier:
    kv_events = NO_KV_EVENTS
    loads = NoLoads()
    stores = NoStores()
    usage = load_bytes_per_second = 0.0
    has_stores = has_planned = False
    occupancy = None

    def plan(self) -> Copies:
        return NO_COPIES

    def end_plan(self) -> None: ...

    def store(self, request: Request) -> None: ...

    def adopt(self, adopted: Adopted) -> None:
        raise AssertionError("only host memory outlives an engine")

    def reset(self) -> None: ...

    def check_integrity(
        self, fetched: tuple[Sequence[Block], Sequence[Block]]
    ) -> tuple[Sequence[Block], Sequence[Block]]:
        return (), ()
