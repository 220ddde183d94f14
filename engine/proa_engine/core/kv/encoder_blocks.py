"""EncoderBlocks: blocks with what cross-attention reads of audios; CrossAudio: the audio of a request that reads one.

The encoder runs before the forward pass of the step in which a request starts, and every cross-attention layer writes
its keys and values of the whole audio. So the blocks are named when they are allocated: a second request of the same
step finds them, unlike blocks of tokens.
"""

from collections.abc import Sequence

from proa.contract import Audio
from proa_engine.core.request_media import UnplacedMedia
from proa_engine.core.types import Block, CrossInput


class CrossAudio(UnplacedMedia):
    """`RequestMedia` of a request whose tokens all read one audio, complete with samples, of `num_tokens` tokens in the
    encoder's output. The audio's hash is among the request's own keys, of every block (`proa.contract.extra_keys`).
    `step_budget`: as in `EncoderBlocks.has_room`."""

    def __init__(self, audio: Audio, num_tokens: int, blocks: "EncoderBlocks", step_budget: int) -> None:
        self.hash = audio.hash
        self.samples = audio.samples
        self.num_tokens = num_tokens
        self._blocks = blocks
        self._step_budget = step_budget

    def limit(self, start: int, num_tokens: int) -> int:
        """Return `num_tokens`, or 0 if the request cannot start in this step, because it encodes other audios."""
        return num_tokens if self._blocks.has_room(self, self._step_budget) else 0


class EncoderBlocks:
    """Blocks by the hash of the audio that is encoded in them.

    All blocks of an audio are referenced and freed together, so they have equal reference counts. If one is evicted,
    the others are worth nothing.
    """

    def __init__(self) -> None:
        self.num_encoded = 0  # since start
        self.num_hits = 0  # times that a request started whose audio was encoded already
        self.cached: dict[bytes, list[Block]] = {}
        self.inputs: list[CrossInput] = []  # of the step that is being planned

    def has_room(self, audio: CrossAudio, step_budget: int) -> bool:
        """Whether a request with this audio can start in this step: it is encoded, or the step encodes audios of at
        most `step_budget` tokens with it, or this one alone."""
        if audio.hash in self.cached or not self.inputs:
            return True
        return sum(each.num_tokens for each in self.inputs) + audio.num_tokens <= step_budget

    def find(self, audio: CrossAudio) -> Sequence[Block]:
        """Return the audio's blocks, none unless it is encoded."""
        return self.cached.get(audio.hash, ())

    def use(self, audio: CrossAudio, new: list[Block]) -> Sequence[Block]:
        """Return the audio's blocks. They are `new` ones, into which this step encodes it, unless it is encoded."""
        if not new:
            self.num_hits += 1
            return self.cached[audio.hash]
        for block in new:
            block.cached_in, block.block_hash = self.cached, audio.hash
        self.cached[audio.hash] = new
        self.num_encoded += 1
        self.inputs.append(CrossInput([block.block_id for block in new], audio.num_tokens, audio.samples))
        return new

    def take_inputs(self) -> list[CrossInput]:
        """Return the audios that the planned step encodes."""
        inputs, self.inputs = self.inputs, []
        return inputs

    def evict(self, block: Block) -> Sequence[Block]:
        """Forget the audio of a block that is about to be allocated. Returns its other blocks, which are free too."""
        blocks = self.cached.pop(block.block_hash)
        for each in blocks:
            each.cached_in = None
        return [each for each in blocks if each is not block]

    def reset(self) -> None:
        """Forget all audios. Running requests keep their blocks."""
        for blocks in self.cached.values():
            for block in blocks:
                block.cached_in = None
        self.cached.clear()

    def check_integrity(self, marked: Sequence[Block]) -> None:
        """Raises `AssertionError` unless, between two steps, `marked` are the blocks of all audios, and those of each
        have one reference count."""
        assert not self.inputs
        expected = {block: audio_hash for audio_hash, blocks in self.cached.items() for block in blocks}
        assert {block: block.block_hash for block in marked} == expected, "audios and blocks differ"
        assert all(len({block.ref_count for block in blocks}) == 1 for blocks in self.cached.values())
