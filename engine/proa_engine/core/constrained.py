"""Requests whose output is constrained by a grammar: each sampled token is accepted by the grammar, or is an error."""

from collections.abc import Sequence

from proa.contract import EngineCoreRequest
from proa_engine.core.grammar import GrammarCursor
from proa_engine.core.request import Request, RequestStatus


class ConstrainedRequest(Request):
    """A request with a grammar. `cursor` is set when the grammar is compiled, and is kept during preemption.

    An end token finishes it as any other request; else a complete grammar does, whatever `min_tokens` and `ignore_eos`
    are; else its length. An end of sequence that completes the grammar is a stop, so that it is not part of the text,
    also with `ignore_eos`. A refused token is dropped.
    """

    __slots__ = ("_model_eos_token_ids", "_verdict", "cursor")

    cursor: GrammarCursor  # behind the tokens in `token_ids`
    _verdict: bool | None  # of the cursor on the oldest token in flight; None: not asked yet

    def __init__(
        self, request: EngineCoreRequest, *, order: tuple[int, ...], max_num_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        super().__init__(request, order=order, max_num_tokens=max_num_tokens, eos_token_ids=eos_token_ids)
        self._model_eos_token_ids = eos_token_ids  # `eos_token_ids` are none with `ignore_eos`
        self._verdict = None

    @property
    def samples(self) -> bool:
        """Whether the step that was just scheduled samples a token, as it does not if known tokens are left."""
        return self.num_placeholders > 0

    def append_plain_token(self, token_id: int) -> bool:
        if not super().append_plain_token(token_id):
            return False
        is_accepted = self.cursor.accept(token_id)
        if is_accepted and not self.cursor.is_complete:
            return True
        self.token_ids.pop()
        self._verdict = is_accepted
        return False

    def append_token(self, token_id: int) -> bool:
        is_accepted = self.cursor.accept(token_id) if self._verdict is None else self._verdict
        self._verdict = None
        if not is_accepted:
            self.status = RequestStatus.FINISHED_ERROR
            self.error = (
                f"the output left its grammar: token {token_id}, its number {self.num_output_tokens + 1}, is not "
                "allowed there, or the grammar is too complex to go on"
            )
            return True
        is_finished = super().append_token(token_id)
        if self.cursor.is_complete and self.status is not RequestStatus.FINISHED_STOPPED:
            is_end = token_id in self._model_eos_token_ids
            self.status = RequestStatus.FINISHED_STOPPED if is_end else RequestStatus.FINISHED_COMPLETE
            return True
        return is_finished


def unfinished_cursors(requests: Sequence[Request], rows: Sequence[int]) -> list[tuple[int, GrammarCursor]]:
    """The cursors of a step's constrained rows, with their indices, except of requests that have finished since."""
    cursors = []
    for row in rows:
        request = requests[row]
        assert isinstance(request, ConstrainedRequest)
        if not request.is_finished:
            cursors.append((row, request.cursor))
    return cursors
