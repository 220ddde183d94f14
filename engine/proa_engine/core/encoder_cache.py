"""EncoderCache: the encoded images that the workers have, and those that a step encodes and frees."""

from collections.abc import Sequence
from dataclasses import dataclass

from proa.contract import Image
from proa_engine.core.types import EncoderInput


@dataclass(slots=True)
class _Encoding:
    num_tokens: int
    num_references: int = 0  # of requests, and of the step that is being planned
    is_encoded: bool = False


class EncoderCache:
    """Encoded images by hash, of at most `capacity` tokens together.

    A request holds the image that it has computed a part of, and the step that is being planned holds every image that
    it reads. Others stay until room is needed; then the least recently used is evicted. Workers run steps in order, so
    an image may be evicted by the step after the last one that reads it, while that one is in flight.

    A step encodes images of at most `step_budget` tokens, or one image, so that many new images do not delay the
    tokens of other requests.
    """

    def __init__(self, capacity: int = 0, step_budget: int = 0) -> None:
        self.num_encoded = 0  # since start
        self.num_hits = 0  # times that a request began to read an image that was encoded already
        self._capacity = capacity
        self._step_budget = step_budget
        self._encodings: dict[bytes, _Encoding] = {}  # the least recently used first
        self._num_tokens = 0  # of all
        self._num_held_tokens = 0
        # Of the step that is being planned.
        self._in_step: set[bytes] = set()
        self._freed: list[bytes] = []
        self._inputs: list[EncoderInput] = []
        self._num_input_tokens = 0
        self._is_full = False  # a request of this step waits for room: those behind it take none

    def num_available(self, images: Sequence[Image]) -> int:
        """How many of these images, counted from the first, the step can read with the next request's tokens.

        If there is no room for an image, later requests of this step get no room either, so that a request cannot
        starve: what others hold is released as they compute the rest of it.
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

    def use(self, images: Sequence[Image], *, continues: bool) -> None:
        """Read available images in this step, and encode those that are not. `continues`: the request has computed a
        part of the first one."""
        for image in images:
            if image.hash in self._encodings:  # before any is evicted, so that none of these is
                self._touch_for_step(image.hash)
        for index, image in enumerate(images):
            if image.hash not in self._encodings:
                self._make_room(image.num_tokens)
                self._encodings[image.hash] = _Encoding(image.num_tokens)
                self._touch_for_step(image.hash)
            encoding = self._encodings[image.hash]
            if encoding.is_encoded:
                self.num_hits += index > 0 or not continues
                continue
            encoding.is_encoded = True
            self.num_encoded += 1
            self._num_input_tokens += image.num_tokens
            self._inputs.append(EncoderInput(image.hash, image.height, image.width, image.pixels))

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
        """The images that the step frees and those that it encodes, none if no tokens are computed."""
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
        """Encode all images again, as after a change of weights, also those that requests hold."""
        for image_hash, encoding in list(self._encodings.items()):
            if encoding.is_encoded:
                self._freed.append(image_hash)
            encoding.is_encoded = False
            if not encoding.num_references:
                self._forget(image_hash)

    def clear(self) -> None:
        """Forget all images, as the workers have lost them. No request may hold any."""
        assert not self._num_held_tokens
        self._encodings.clear()
        self._freed, self._num_tokens = [], 0

    def check_integrity(self, held: Sequence[bytes]) -> None:
        """Raises `AssertionError` unless, between two steps, exactly the images `held` by requests are held, each as
        often as it is among them."""
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
