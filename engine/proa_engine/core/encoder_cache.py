"""EncoderCache: which encoded images and audios the workers hold, and which ones a step encodes and frees.

What is said of images here is true of audios that have tokens in the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proa.contract import Audio, Image
from proa_engine.core.types import EncoderInput


@dataclass(slots=True)
class _Encoding:
    num_tokens: int
    num_references: int = 0  # by requests and by the step that is being planned
    is_encoded: bool = False


class EncoderCache:
    """Encoded images by hash, of at most `capacity` tokens together.

    A request references the image that it has computed a part of, and the step that is being planned references every
    image that it reads. Images without references stay until room is needed; the least recently used is evicted first.
    Workers run steps in order, so the step after the last one that reads an image may evict it while that one is in
    flight.

    A step encodes images of at most `step_budget` tokens, or one image, so that many new images do not delay the tokens
    of other requests.
    """

    def __init__(self, capacity: int = 0, step_budget: int = 0) -> None:
        self.num_encoded: dict[type, int] = {Image: 0, Audio: 0}  # since start
        self.num_hits: dict[type, int] = {Image: 0, Audio: 0}  # times that a request began to read an encoded one
        self._capacity = capacity
        self._step_budget = step_budget
        self._encodings: dict[bytes, _Encoding] = {}  # the least recently used first
        self._num_tokens = 0  # of all images
        self._num_held_tokens = 0
        # The step that is being planned:
        self._in_step: set[bytes] = set()
        self._freed: list[bytes] = []
        self._inputs: list[EncoderInput] = []
        self._num_input_tokens = 0
        self._is_full = False  # a request waits for room: those scheduled after it get none

    def num_available(self, images: Sequence[Image | Audio]) -> int:
        """Return how many of `images`, counted from the first, this step can read with the next request's tokens.

        If there is no room for an image, no request scheduled after this one gets room in this step. Otherwise a
        request could starve: room is freed only as running requests compute the rest of their images.
        """
        room, num_input_tokens = self._capacity - self._num_held_tokens, self._num_input_tokens
        seen = set[bytes]()
        for index, image in enumerate(images):
            encoding = self._encodings.get(image.hash)
            if image.hash in seen:
                continue
            seen.add(image.hash)
            if encoding is None or not encoding.num_references:
                room -= image.num_tokens
                if room < 0 or self._is_full:
                    self._is_full = True
                    return index
            if encoding is None or not encoding.is_encoded:
                if num_input_tokens and num_input_tokens + image.num_tokens > self._step_budget:
                    return index
                num_input_tokens += image.num_tokens
        return len(images)

    def use(self, images: Sequence[Image | Audio], *, continues: bool) -> None:
        """Read available images in this step, and encode those that are not encoded yet. `continues`: the request has
        computed a part of the first one."""
        for image in images:
            if image.hash in self._encodings:  # before evicting, so that none of these is evicted
                self._touch_for_step(image.hash)
        for index, image in enumerate(images):
            if image.hash not in self._encodings:
                self._make_room(image.num_tokens)
                self._encodings[image.hash] = _Encoding(image.num_tokens)
                self._touch_for_step(image.hash)
            encoding = self._encodings[image.hash]
            if encoding.is_encoded:
                self.num_hits[type(image)] += index > 0 or not continues
                continue
            encoding.is_encoded = True
            self.num_encoded[type(image)] += 1
            self._num_input_tokens += image.num_tokens
            self._inputs.append(EncoderInput(image.hash, image.shape, image.data))

    def touch(self, image_hash: bytes) -> None:
        """Add a reference to an image, which keeps it until `free`."""
        encoding = self._encodings[image_hash]
        self._num_held_tokens += 0 if encoding.num_references else encoding.num_tokens
        encoding.num_references += 1

    def free(self, image_hash: bytes) -> None:
        encoding = self._encodings[image_hash]
        encoding.num_references -= 1
        if encoding.num_references == 0:
            self._num_held_tokens -= encoding.num_tokens
            if not encoding.is_encoded:
                self._forget(image_hash)

    def end_step(self, *, has_tokens: bool) -> tuple[list[bytes], list[EncoderInput]]:
        """Return the images that the step frees and those that it encodes, both empty for a step without tokens."""
        self._is_full = False
        if not has_tokens:
            assert not self._inputs, "an image is encoded for tokens"
            return [], []
        for image_hash in self._in_step:
            self.free(image_hash)
        freed, inputs = self._freed, self._inputs
        self._in_step, self._freed, self._inputs, self._num_input_tokens = set(), [], [], 0
        return freed, inputs

    def reset(self) -> None:
        """Mark all images to be encoded again, as after a change of weights, also those that requests reference."""
        for image_hash, encoding in list(self._encodings.items()):
            if encoding.is_encoded:
                self._freed.append(image_hash)
            encoding.is_encoded = False
            if not encoding.num_references:
                self._forget(image_hash)

    def clear(self) -> None:
        """Forget all images, because the workers have lost them. No request may reference any."""
        assert not self._num_held_tokens
        self._encodings.clear()
        self._freed, self._num_tokens = [], 0

    def check_integrity(self, held: Sequence[bytes]) -> None:
        """Raises `AssertionError` unless, between two steps, each image has as many references as it occurs in `held`,
        the images that requests hold."""
        assert not any((self._in_step, self._inputs, self._num_input_tokens, self._is_full))
        holds = {image_hash: each.num_references for image_hash, each in self._encodings.items() if each.num_references}
        assert holds == {image_hash: held.count(image_hash) for image_hash in held}
        assert self._num_tokens == sum(each.num_tokens for each in self._encodings.values()) <= self._capacity
        assert self._num_held_tokens == sum(self._encodings[image_hash].num_tokens for image_hash in holds)
        assert all(each.is_encoded or each.num_references for each in self._encodings.values())

    def _touch_for_step(self, image_hash: bytes) -> None:
        self._encodings[image_hash] = self._encodings.pop(image_hash)  # the most recently used
        if image_hash not in self._in_step:
            self._in_step.add(image_hash)
            self.touch(image_hash)

    def _make_room(self, num_tokens: int) -> None:
        unheld = (image_hash for image_hash, encoding in self._encodings.items() if not encoding.num_references)
        evicted, num_free = list[bytes](), self._capacity - self._num_tokens
        while num_free < num_tokens:
            evicted.append(next(unheld))
            num_free += self._encodings[evicted[-1]].num_tokens
        for image_hash in evicted:
            self._freed.append(image_hash)
            self._forget(image_hash)
        self._num_tokens += num_tokens

    def _forget(self, image_hash: bytes) -> None:
        self._num_tokens -= self._encodings.pop(image_hash).num_tokens
