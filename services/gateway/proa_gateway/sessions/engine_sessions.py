"""EngineSessions: tells an engine which blocks sessions retain, with the requests that are sent to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proa.blocks import hash_blocks, root_hash
from proa.contract import EngineCoreRequest, ModelInfo, SchedulerStats, SessionClaim, extra_keys
from proa_gateway.sessions.model_sessions import Engine, ModelSessions
from proa_gateway.sessions.session import Turn

_REPORT_SECONDS: Final = 0.1  # shortest time between two reports that are looked at: engines send one with each step


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

    def __init__(
        self,
        engine: Engine,
        info: ModelInfo,
        model: ModelSessions,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        """`model`: the sessions of the engine's model. `on_change`: called when there may be room for another
        resident."""
        self._engine = engine
        self._root, self._block_size = root_hash(info.model, info.revision), info.block_size
        self._clock = clock
        self._on_change = on_change
        self._claim = SessionClaim()  # as the engine was told
        self._claims = info.session_claims
        self._reported_at = 0.0
        # Host memory has copies of all blocks, so a place in it saves computing too. Its own order of eviction costs
        # nothing: see the simulation in docs/sessions.md.
        self._table = model.add(engine, max(info.num_gpu_blocks, info.num_host_blocks))
        self.model = model

    @property
    def num_residents(self) -> int:
        """Sessions with a place."""
        return len(self._table.places.residents)

    def begin(
        self,
        request: EngineCoreRequest,
        hashes: Sequence[bytes],
        before: RunningTurn | None,
        client_id: str | None = None,
    ) -> RunningTurn | None:
        """The request is about to be sent. `hashes`: of its prompt's full blocks, if they are known. `before`: of its
        last attempt, which has ended. `client_id`: the client's for its conversation. None: it takes no part."""
        if not hashes or not _is_turn(request):
            return None
        turn = self.model.arrive(hashes, client_id) if before is None else before.turn
        now = self._clock()
        retain = not turn.is_first and self._table.admit(turn, now)
        self._table.start(turn, now)
        return RunningTurn(retain, self._table.places.take_released(), self, request, turn)

    def end(self, turn: Turn, request: EngineCoreRequest, output: Sequence[int]) -> None:
        """The engine has not computed the last token. What a session without a place has is not told apart from others'
        blocks, so those of its output get no hashes."""
        num_blocks = (len(request.prompt_token_ids) + len(output) - 1) // self._block_size
        turn.session.num_blocks = max(num_blocks, len(turn.hashes))
        blocks = self._hash_output(turn, request, output) if turn.session.is_resident else ()
        self._table.end(turn, blocks, self._clock())
        self._on_change()

    def _hash_output(self, turn: Turn, request: EngineCoreRequest, output: Sequence[int]) -> Sequence[bytes]:
        """Hash the blocks behind those of the prompt as the engine does."""
        keys = extra_keys(request.cache_salt, request.lora_name, request.lora_digest, request.audios)
        known, prompt = len(turn.hashes), request.prompt_token_ids
        if request.media:  # one may reach into the block in which the output begins
            tokens = [*prompt, *output][:-1]
            return hash_blocks(self._root, tokens, self._block_size, keys, request.media)[known:]
        tokens = [*prompt[known * self._block_size :], *output][:-1]
        return hash_blocks(turn.hashes[-1], tokens, self._block_size, keys)

    def on_stats(self, stats: SchedulerStats) -> SessionClaim | None:
        """The engine has reported. Returns what to tell it, if that has changed."""
        now = self._clock()
        if now - self._reported_at < _REPORT_SECONDS:
            return None
        self._reported_at = now
        self.model.observe(self._engine, stats.num_claimed_elsewhere, stats.longest_wait_elsewhere)
        self.model.tick()
        claim = self.model.claim(self._engine)
        if not self._claims or claim == self._claim:
            return None
        self._claim = claim
        return claim

    def leave(self) -> None:
        """The engine gets no more requests: its residents have no place any more."""
        self.model.evacuate(self._engine)
        self._on_change()

    def close(self) -> None:
        """The engine is not connected any more."""
        self.model.remove(self._engine)
        self._on_change()


def _is_turn(request: EngineCoreRequest) -> bool:
    """Whether the request reads the cache and generates, so that another turn may continue it."""
    if request.prefill_only or request.pooling_params or request.prompt_embeds:
        return False
    return request.sampling_params.prompt_logprobs is None
