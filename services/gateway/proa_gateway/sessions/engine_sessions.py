"""EngineSessions: tells an engine which blocks sessions retain, with the requests that are sent to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proa.blocks import hash_blocks, root_hash
from proa.contract import EngineCoreRequest, ModelInfo, extra_keys
from proa_gateway.sessions.session_table import SessionTable, Turn

_UNKNOWN_RATE: Final = 1000.0  # prompt tokens a second of an engine that has not measured it


@dataclass(slots=True)
class RunningTurn:
    """A request that runs on an engine. `released`: hashes of blocks that other sessions retain no more."""

    retain: bool
    released: Sequence[bytes]
    sessions: "EngineSessions"
    request: EngineCoreRequest
    turn: Turn
    has_ended: bool = False

    def end(self, output: Sequence[int]) -> None:
        """The request has ended with these output tokens. Without effect a second time."""
        if not self.has_ended:
            self.has_ended = True
            self.sessions.end(self.turn, self.request, output)


class EngineSessions:
    """While one engine is connected."""

    def __init__(self, model: ModelInfo, clock: Callable[[], float], on_change: Callable[[], None]) -> None:
        """`on_change`: called when there may be room for another resident."""
        self._on_change = on_change
        self._num_waiting_blocks = 0
        self._root, self._block_size = root_hash(model.model, model.revision), model.block_size
        self._clock = clock
        self.table = SessionTable(model.num_gpu_blocks)

    @property
    def num_residents(self) -> int:
        """Sessions with a place."""
        return len(self.table.places.residents)

    @property
    def capacity(self) -> float:
        """How many sessions of the residents' mean size fit; 0: not known."""
        places = self.table.places
        return places.capacity * self.num_residents / len(places.held) if places.held else 0.0

    @property
    def demand(self) -> float:
        """Blocks of residents, and of turns that wait, of all that there are; 1: it is full."""
        return (len(self.table.places.held) + self._num_waiting_blocks) / self.table.places.capacity

    def expect(self, hashes: Sequence[bytes]) -> Turn | None:
        """The turn that a prompt is going to be, if its session may have to wait for a place."""
        return self.table.expect(hashes) if hashes else None

    def admit(self, turn: Turn) -> bool:
        """Whether the turn's session has a place."""
        return self.table.admit(turn, self._clock())

    def displace(self, turn: Turn, tokens_per_second: float, head_since: float) -> bool:
        """Whether the queue's head, there since that time, gets a place for which idle residents leave."""
        rate = (tokens_per_second or _UNKNOWN_RATE) / self._block_size
        return self.table.displace(turn, self._clock(), rate, head_since)

    def tick(self, waiting: Sequence[Turn], *, is_busy: bool) -> None:
        """Count what places cost while these turns wait for some. `is_busy`: the engine has waiting prompts."""
        self._num_waiting_blocks = sum(self.table.places.missing(each.hashes) for each in waiting)
        self.table.tick(self._clock(), is_waiting=bool(waiting), is_busy=is_busy)

    def begin(self, request: EngineCoreRequest, hashes: Sequence[bytes]) -> RunningTurn | None:
        """The request is about to be sent. `hashes`: of its prompt's full blocks, if they are known. None: it takes no
        part."""
        if not hashes or not _is_turn(request):
            return None
        now = self._clock()
        turn = self.table.arrive(hashes, now)
        retain = not turn.is_first and self.table.admit(turn, now)
        self.table.start(turn, now)
        return RunningTurn(retain, self.table.places.take_released(), self, request, turn)

    def end(self, turn: Turn, request: EngineCoreRequest, output: Sequence[int]) -> None:
        """The blocks of the output are hashed as the engine does. It has not computed the last token."""
        keys = extra_keys(request.cache_salt, request.lora_name, request.lora_digest, request.audios)
        tokens, known = [*request.prompt_token_ids, *output][:-1], len(turn.hashes)
        if request.media:  # one may reach into the block in which the output begins
            blocks = hash_blocks(self._root, tokens, self._block_size, keys, request.media)[known:]
        else:
            blocks = hash_blocks(turn.hashes[-1], tokens[known * self._block_size :], self._block_size, keys)
        self.table.end(turn, blocks, self._clock())
        self._on_change()


def _is_turn(request: EngineCoreRequest) -> bool:
    """Whether the request reads the cache and generates, so that another turn may continue it."""
    if request.prefill_only or request.pooling_params or request.prompt_embeds:
        return False
    return request.sampling_params.prompt_logprobs is None
