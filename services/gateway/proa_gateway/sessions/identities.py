"""Identities: finds the session that a prompt continues, without an id of the client."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Final

from proa_gateway.sessions.session import MAX_MARKS, Means, Session

MAX_SESSIONS: Final = 4096
_MAX_OTHER_CONTINUATIONS: Final = 1


class Identities:
    """The sessions by the marks that their prompts have left.

    A prompt that contains the mark of a session's last prompt, and is longer, is its next turn. With an older mark it
    is too, since a client may have edited the end; but while another turn of the session runs it is a branch, a session
    of its own. A block in which prompts of several sessions end, such as that of a system prompt, is no mark.

    Ids of clients do not tell sessions apart: sub-agents have that of the session which called them, and at times all
    conversations of a user have one. So the first session with an id is taken for the parent of the others.
    """

    def __init__(self) -> None:
        self.means = Means()  # of all sessions
        self._sessions: dict[Session, None] = {}  # in the order of their last turns
        self._by_mark: dict[bytes, Session] = {}
        self._by_client_id: dict[str, Session] = {}
        # A prompt is looked up three times before it is sent: the last one, and its mark, until marks change.
        self._last: tuple[Sequence[bytes], bytes] = (), b""
        self._other_continuations = Counter[bytes]()  # by mark: turns that did not continue the last prompt

    def find(self, hashes: Sequence[bytes]) -> Session | None:
        """The session that a prompt with these blocks continues."""
        return self._idle(self._last_mark(hashes))

    def arrive(self, hashes: Sequence[bytes], client_id: str | None = None) -> Session:
        """The session of a prompt that has come, with these blocks, at least one; a new one if it continues none."""
        while (mark := self._last_mark(hashes)) and mark != self._by_mark[mark].marks[-1]:
            self._other_continuations[mark] += 1
            if self._other_continuations[mark] <= _MAX_OTHER_CONTINUATIONS:
                break
            self._unmark(self._by_mark[mark], mark)
        return self._idle(mark) or self._new(client_id)

    def mark(self, session: Session, hashes: Sequence[bytes]) -> list[Session]:
        """The session's prompt with these blocks is sent. Returns sessions that are forgotten for it: the least
        recently used ones without a running turn."""
        self._sessions.pop(session, None)
        self._sessions[session] = None
        self._last = (), b""
        last = hashes[-1]
        owner = self._by_mark.get(last)
        if owner is not session:
            if owner is not None:
                self._unmark(owner, last)
            self._by_mark[last] = session
            session.marks.append(last)
            if len(session.marks) > MAX_MARKS:
                self._unmark(session, session.marks[0])
        excess = len(self._sessions) - MAX_SESSIONS
        if excess <= 0:
            return []
        idle = (each for each in self._sessions if not each.num_running and each is not session)
        forgotten = [each for each, _ in zip(idle, range(excess), strict=False)]
        for each in forgotten:
            self.forget(each)
        return forgotten

    def forget(self, session: Session) -> None:
        del self._sessions[session]
        if session.client_id is not None:
            self._by_client_id.pop(session.client_id, None)
        for block_hash in list(session.marks):
            self._unmark(session, block_hash)

    def _new(self, client_id: str | None) -> Session:
        session = Session(Means(self.means.gap, self.means.growth))
        if client_id is not None:
            first = self._by_client_id.setdefault(client_id, session)
            if first is session:
                session.client_id = client_id
            else:
                session.parent = first
        return session

    def _last_mark(self, hashes: Sequence[bytes]) -> bytes:
        """The last block that is a mark, and not the prompt's own last one; b"" if there is none."""
        if self._last[0] is not hashes:
            mark = b""
            if not self._by_mark.keys().isdisjoint(hashes):  # a prompt of no session ends here, in C
                mark = next((each for each in islice(reversed(hashes), 1, None) if each in self._by_mark), b"")
            self._last = hashes, mark
        return self._last[1]

    def _idle(self, mark: bytes) -> Session | None:
        """The session of a mark, if no turn of it runs."""
        session = self._by_mark.get(mark)
        return None if session is None or session.num_running else session

    def _unmark(self, session: Session, block_hash: bytes) -> None:
        self._last = (), b""
        session.marks.remove(block_hash)
        del self._by_mark[block_hash]
        self._other_continuations.pop(block_hash, None)
