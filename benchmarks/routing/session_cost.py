"""What the table of sessions costs the gateway's thread for a prompt: `python -m benchmarks.routing.session_cost`.

Microseconds of this thread from the prompt's arrival to its end, without the hashes, which routing needs anyway: for a
prompt of no session, and for a next turn with 2,000 new tokens. 20 sessions of 100,000 tokens have places. The least of
the rounds.
"""

import argparse
import time
from collections.abc import Sequence

from benchmarks.routing.session_engines import SimulatedEngine
from proa.blocks import hash_blocks, root_hash
from proa.contract import EngineCoreRequest, ModelInfo, SamplingParams
from proa_gateway.sessions.engine_sessions import EngineSessions
from proa_gateway.sessions.model_sessions import ModelSessions

BLOCK_SIZE = 16
OUTPUT = [7] * 32
NUM_SESSIONS, SESSION_TOKENS, NEW_TOKENS = 20, 100_000, 2_000
ROUNDS = 50
INFO = ModelInfo(
    model_name="m",
    model="m",
    max_model_len=1_000_000,
    vocab_size=1_000_000,
    block_size=BLOCK_SIZE,
    num_gpu_blocks=1_000_000,
    block_hash_version=1,
    max_num_seqs=256,
    max_logprobs=0,
    max_waiting_requests=1,
    engine_version="0",
    max_num_batched_tokens=8192,
    prefix_caching=True,
)


class Gateway:
    def __init__(self) -> None:
        self.sessions = ModelSessions(BLOCK_SIZE, time.monotonic, lambda address, hashes: 0)
        engine = SimulatedEngine("engine", 0, 1.0, time.monotonic, lambda at, event: None)
        self.engine = EngineSessions(engine, INFO, self.sessions, time.monotonic, lambda: None)
        for number in range(NUM_SESSIONS):
            for length in (SESSION_TOKENS // 2, SESSION_TOKENS):
                self.serve([number] * length, hashes_of([number] * length))

    def serve(self, tokens: Sequence[int], hashes: Sequence[bytes]) -> float:
        """Microseconds of the thread."""
        request = EngineCoreRequest(request_id="a", prompt_token_ids=tokens, sampling_params=SamplingParams())
        started = time.thread_time_ns()
        turn = self.sessions.expect(hashes)
        if turn is not None and not self.sessions.passes(turn):
            self.sessions.place(turn)
        self.sessions.home(hashes)
        running = self.engine.begin(request, hashes, None)
        assert running is not None
        running.end(OUTPUT)
        return (time.thread_time_ns() - started) / 1000


def hashes_of(tokens: Sequence[int]) -> Sequence[bytes]:
    """Of the full blocks, which the prefix index has looked up before."""
    hashes = hash_blocks(root_hash(INFO.model, INFO.revision), tokens, BLOCK_SIZE)
    frozenset(hashes)
    return hashes


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gateway = Gateway()
    for length in (512, 8_192, 131_072):
        prompts = [[length + number] * length for number in range(ROUNDS)]  # none continues another
        print(
            f"a prompt of {length:7,} tokens: {min(gateway.serve(each, hashes_of(each)) for each in prompts):7.1f} µs"
        )
    lengths = [SESSION_TOKENS + NEW_TOKENS * (turn + 1) for turn in range(10)]
    turns = [gateway.serve([0] * length, hashes_of([0] * length)) for length in lengths]
    print(f"a next turn of {lengths[-1]:7,} tokens: {min(turns):7.1f} µs")


if __name__ == "__main__":
    main()
