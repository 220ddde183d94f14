"""Random requests for a core, arriving and aborted at random, and a subscriber to its KV events."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from proa.contract import Audio, EngineCoreRequest, EventType, FinishReason, Grammar, Image, PoolingTask, PromptEmbeds
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv_events import KvChanges, KvEventBatch
from proa_engine.core.operations import EndStream
from support.core import EOS, CoreRun, make_pooled, make_request
from support.fake_audio import random_audio
from support.fake_disk import FakeDisk
from support.fake_embeds import random_embeds, with_embeds
from support.fake_executor import VOCAB_SIZE, generate
from support.fake_grammar import NEVER, fake_grammar, generate_constrained
from support.fake_images import IMAGE_TOKEN, make_image, seen

MAX_MODEL_LEN = 60


def random_prompt(rng: random.Random, prefixes: Sequence[Sequence[int]]) -> list[int]:
    """A prefix, some part of it, or none, and an end of its own or of one of two tokens, so that blocks look alike."""
    prefix = rng.choice(prefixes)
    vocabulary = rng.choice([2, VOCAB_SIZE])
    start = prefix[: rng.choice([rng.randint(0, len(prefix)), len(prefix)])]
    end = [rng.randrange(vocabulary) for _ in range(rng.randint(0 if start else 1, 12))]
    return [*start, *end]


def random_schedule(seed: int, max_drafts: int) -> tuple[tuple[int, int], ...]:
    """Numbers of draft tokens that change with the number of rows, for three of four seeds."""
    rng = random.Random(f"schedule {seed}")
    if seed % 4 == 0 or not max_drafts:
        return ()
    return tuple((num_rows, rng.randint(0, max_drafts)) for num_rows in (1, 2, 3, 5, 8))


def random_host(rng: random.Random, seed: int) -> dict[str, Any]:
    """Arguments of a run for a host tier of random size, in a third of the seeds; mostly with a source of fetches, then
    often with a disk."""
    if seed % 3 != 1:
        return {}
    host = HostTierConfig(
        num_pages=rng.choice([1, 2, 5, rng.randint(3, 20), 100, 300]),
        num_states=rng.choice([1, 2, 20]),
        max_step_pages=rng.choice([1, 2, 5, 1000]),
        state_pages=rng.randint(1, 3),
        min_load_tokens=rng.choice([1, 1, 8, 16]),
    )
    fetches = random.Random(rng.random()) if rng.random() < 0.7 else None
    disk = FakeDisk() if fetches is not None and rng.random() < 0.6 else None
    return {"host": host, "fetches": fetches, "disk": disk}


class ImagePrompts:
    """Random prompts with images of these names and numbers of tokens. They begin with a few stems, so that hits end
    inside and behind images."""

    def __init__(self, rng: random.Random, prefixes: Sequence[Sequence[int]], kinds: Sequence[tuple[int, int]]) -> None:
        self._rng = rng
        self._kinds = kinds
        self._stems = [self._insert(prefix, ()) for prefix in prefixes]

    def make(self) -> tuple[list[int], tuple[Image, ...]]:
        """A prompt and its images, each with pixels or without."""
        stem, images = self._rng.choice(self._stems)
        end = [self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.randint(1, 6))]
        prompt, images = self._insert([*stem, *end], images)
        return prompt, tuple(image if self._rng.random() < 0.8 else replace(image, pixels=b"") for image in images)

    def _insert(self, prompt: Sequence[int], images: tuple[Image, ...]) -> tuple[list[int], tuple[Image, ...]]:
        """The prompt with further images behind those that it has, as far as there is room."""
        offset, token_ids = images[-1].end if images else 0, list(prompt)
        for _ in range(self._rng.choice([0, 1, 1, 2, 3])):
            offset = self._rng.randint(offset, len(token_ids))
            image = make_image(*self._rng.choice(self._kinds), offset)
            if len(token_ids) + image.num_tokens > MAX_MODEL_LEN - 10:
                break
            token_ids[offset:offset] = [IMAGE_TOKEN] * image.num_tokens
            images, offset = (*images, image), image.end
        return token_ids, images


def follow_up(rng: random.Random, request: EngineCoreRequest) -> list[int]:
    """A prompt that continues the request's prompt and output."""
    output = [] if request.pooling_params else expected_output(request)[0]
    question = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
    return [*request.prompt_token_ids, *output, *question][: MAX_MODEL_LEN - rng.randint(1, 12)]


def random_grammar(rng: random.Random) -> Grammar:
    if rng.random() < 0.05:
        return Grammar(text=rng.choice(["invalid", "busy"]))
    start_after = rng.choice([(), (), tuple(rng.sample(range(VOCAB_SIZE), 8))])
    return fake_grammar(
        seed=rng.randrange(4),
        length=rng.choice([0, 1, 2, rng.randint(3, 20), NEVER]),
        fuel=rng.choice([NEVER, NEVER, NEVER, rng.randint(0, 8)]),
        run=rng.choice([0, 2, 6, 8, 8]),
        start_after=start_after,
        free_if_first=tuple(rng.sample(range(VOCAB_SIZE), 30)) if start_after and rng.random() < 0.5 else (),
        repeats=bool(start_after) and rng.random() < 0.5,
    )


def random_request(
    rng: random.Random,
    request_id: str,
    prompt: list[int],
    grammar_share: float = 0.0,
    lora_digest: str = "",
    images: tuple[Image, ...] = (),
    embeds: tuple[PromptEmbeds, ...] = (),
    audios: tuple[Audio, ...] = (),
) -> EngineCoreRequest:
    """With the adapter of this content, whose name is the part before `@`, with images and embeddings in the prompt,
    and with audios."""
    max_tokens = rng.choice([None, 1, 2, rng.randint(1, 30)])
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(rng.choice([0, 0, 3]), max_tokens or 3),
        "ignore_eos": rng.random() < 0.3,
        "stop_token_ids": rng.choice([(), (), (7, 8), (0,)]),
        "logprobs": rng.choice([None, None, 0]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
        "grammar": random_grammar(rng) if rng.random() < grammar_share else None,
    }
    if embeds:
        params["prompt_logprobs"] = None
    params |= {"lora_name": lora_digest.partition("@")[0], "lora_digest": lora_digest}
    request = make_request(
        request_id, prompt, priority=rng.randint(-2, 2), cache_salt=rng.choice(["", "", "salt"]), **params
    )
    request = replace(request, images=images, prompt_embeds=embeds, audios=audios)
    output, reason = expected_output(request)
    # Another engine may have died between the last token and the end, if only this engine knows that it is the end.
    most = len(output) - (reason is not FinishReason.COMPLETE or len(output) == max_tokens)
    if rng.random() < 0.1 and most > 0 and len(prompt) + most < MAX_MODEL_LEN:
        resumed = output[: rng.randint(1, most)]
        resumed_request = make_request(request_id, prompt, priority=request.priority, resumed=resumed, **params)
        return replace(resumed_request, images=images, prompt_embeds=embeds, audios=audios)
    return request


def prefill_of(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request for the prompt alone, as a gateway sends it to another engine."""
    params = replace(request.sampling_params, prompt_logprobs=None)
    return replace(request, request_id=f"p{request.request_id}", sampling_params=params, prefill_only=True)


def random_pooled(
    rng: random.Random, request_id: str, prompt: list[int], images: tuple[Image, ...] = ()
) -> EngineCoreRequest:
    salt, task = rng.choice(["", "", "salt"]), rng.choice(list(PoolingTask))
    request = make_pooled(request_id, prompt, task, priority=rng.randint(-2, 2), cache_salt=salt)
    return replace(request, images=images)


def expected_output(request: EngineCoreRequest) -> tuple[list[int], FinishReason | None]:
    """The output of the request alone, with its end if it has a grammar."""
    params = request.sampling_params
    if params.grammar is None:
        prompt = with_embeds(seen(request.prompt_token_ids, request.media), request.prompt_embeds)
        return generate(prompt, params, EOS, MAX_MODEL_LEN, request.lora_digest), None
    if params.grammar.text in ("invalid", "busy"):
        return [], None
    return generate_constrained(request, EOS, MAX_MODEL_LEN)


class Follower:
    """A subscriber from a random step on, which reads at random; changes merge in between."""

    def __init__(self, run: CoreRun, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.start = rng.randint(0, 60)
        self.each: set[bytes] | None = None  # by every step's changes
        self.checkpoints: set[bytes] = set()  # likewise
        self.host: set[bytes] = set()  # of the host tier, likewise
        self.host_checkpoints: set[bytes] = set()
        self.merged: set[bytes] = set()  # by fewer, larger ones
        self.pending = KvChanges()
        self.num_changes = 0

    def step(self) -> None:
        self.start -= 1
        if self.start == 0 or self.rng.random() < 0.02:
            self.run.core.follow_kv_events()
        self.run.step()
        for batch in self.run.kv_events:
            uses_snapshot = self.each is None or (batch.snapshot is not None and self.rng.random() < 0.5)
            changes, checkpoints = changes_of(batch, uses_snapshot=uses_snapshot)
            self.checkpoints = replay(self.checkpoints, checkpoints)
            if batch.host is not None:
                of_host, host_checkpoints = changes_of(batch.host, uses_snapshot=uses_snapshot)
                self.host = replay(self.host, of_host)
                self.host_checkpoints = replay(self.host_checkpoints, host_checkpoints)
            self.each = replay(self.each or set(), changes)
            self.pending.merge(changes)
            self.num_changes += len(batch.changes)
        self.run.kv_events.clear()
        if self.each is not None:
            assert self.each == self.run.cached_hashes
            assert self.checkpoints == self.run.checkpoints
            assert (self.host, self.host_checkpoints) == self.run.hashes_in_host
        if self.rng.random() < 0.2:
            self.merged = replay(self.merged, self.pending)
            self.pending = KvChanges()
            assert self.merged == (self.each or set())


def changes_of(batch: KvEventBatch, *, uses_snapshot: bool) -> tuple[KvChanges, KvChanges]:
    """Of blocks and of checkpoints."""
    if not uses_snapshot:
        return batch.changes, batch.checkpoints
    assert batch.snapshot is not None, "the first batch has a snapshot"
    return KvChanges.snapshot(batch.snapshot), KvChanges.snapshot(batch.checkpoint_snapshot)


def replay(held: set[bytes], changes: KvChanges) -> set[bytes]:
    """The cache's content after the changes, none of which is redundant."""
    if changes.is_snapshot:
        assert not changes.removed
        return set(changes.stored)
    assert held >= changes.removed.keys()
    assert not held & changes.stored.keys()
    return held - changes.removed.keys() | changes.stored.keys()


class Traffic:
    """Random arrivals and aborts, between steps and in the middle of them."""

    def __init__(
        self,
        run: CoreRun,
        rng: random.Random,
        num_requests: int,
        abort_share: float,
        grammar_share: float = 0.0,
        follow_up_share: float = 0.0,
        pooled_share: float = 0.0,
        lora_digests: Sequence[str] = (),
        image_kinds: Sequence[tuple[int, int]] = (),
        prefill_share: float = 0.0,
        embeds_share: float = 0.0,
        retention: random.Random | None = None,
        has_audio: bool = False,
    ) -> None:
        """Requests have each of `lora_digests` as often as none. `image_kinds` are names and numbers of tokens. Before
        `prefill_share` of those that generate comes a request with `prefill_only`. `embeds_share` of those that
        generate and follow no other have prompt embeddings. `retention`: requests come from streams, which retain
        blocks, release them and end at random. `has_audio`: each request reads an audio."""
        self.run = run
        self.rng = rng
        self.abort_share = abort_share
        self.retention = retention
        self.aborted: set[str] = set()
        self.requests: dict[str, EngineCoreRequest] = {}
        prefixes = [
            [rng.randrange(vocabulary) for _ in range(length)] for vocabulary in (2, 61) for length in (5, 16, 28)
        ]
        with_images = ImagePrompts(rng, prefixes, image_kinds) if image_kinds else None
        self.coming: list[EngineCoreRequest] = []  # the next one last
        for index in range(num_requests):
            images: tuple[Image, ...] = ()
            embeds: tuple[PromptEmbeds, ...] = ()
            if self.coming and rng.random() < follow_up_share:
                followed = rng.choice(self.coming)
                prompt = follow_up(rng, followed)
                images = tuple(image for image in followed.images if image.end <= len(prompt))
                embeds = tuple(each for each in followed.prompt_embeds if each.end <= len(prompt))
            elif with_images is not None and rng.random() < 0.8:
                prompt, images = with_images.make()
            else:
                prompt = random_prompt(rng, prefixes)
                if embeds_share and rng.random() < embeds_share:
                    prompt, embeds = random_embeds(rng, prompt)
            if pooled_share and not embeds and rng.random() < pooled_share:
                self.coming.insert(0, random_pooled(rng, f"r{index}", prompt, images))
            else:
                digest = rng.choice(["", *lora_digests])
                audios = (random_audio(rng),) if has_audio else ()
                request = random_request(rng, f"r{index}", prompt, grammar_share, digest, images, embeds, audios)
                if prefill_share and rng.random() < prefill_share:
                    self.coming.insert(0, prefill_of(request))
                self.coming.insert(0, request)
        grammars = [request.sampling_params.grammar for request in self.coming]
        run.grammars.known = {grammar.text for grammar in grammars if grammar is not None and rng.random() < 0.3}
        run.grammars.known -= {"invalid", "busy"}
        run.executor.while_waiting = self.disturb
        self.step = run.step  # how a step is made

    def disturb(self) -> None:
        while self.coming and self.rng.random() < 0.4:
            request = self._retaining(self.coming.pop())
            self.requests[request.request_id] = request
            self.run.submit(request)
        while self.run.grammars.jobs and self.rng.random() < 0.3:
            self.run.grammars.compile(self.rng.randrange(len(self.run.grammars.jobs)))
        if self.requests and self.rng.random() < self.abort_share:
            request_id = self.rng.choice(list(self.requests))
            self.aborted.add(request_id)
            self.run.core.abort([request_id, "unknown"])

    def _retaining(self, request: EngineCoreRequest) -> EngineCoreRequest:
        if (rng := self.retention) is None:
            return request
        if rng.random() < 0.05:
            self.run.core.operate(EndStream(rng.randint(1, 2)))
        known = sorted(self.run.cached_hashes)
        released = rng.sample(known, rng.randint(0, len(known))) if rng.random() < 0.3 else []
        return replace(request, client_index=rng.randint(0, 2), retain=rng.random() < 0.5, released=released)

    def drive(self) -> None:
        for _ in range(20_000):
            if not self.coming:
                break
            self.disturb()
            self.step()
        self.run.finish()

    def check(self, request: EngineCoreRequest) -> None:
        request_id = request.request_id
        outputs = self.run.outputs[request_id]
        if request.pooling_params is not None:
            self.check_pooled(request)
            return
        if request.prefill_only:
            self.check_prefill(request)
            return
        whole, reason = expected_output(request)
        expected = whole[len(request.resumed_token_ids) :]
        finished = [output.finish_reason for output in outputs if output.finish_reason is not None]
        assert len(finished) == 1
        assert outputs[-1].finish_reason is not None
        tokens = self.run.tokens(request_id)
        if finished[0] is FinishReason.ABORT:
            assert request_id in self.aborted
            assert tokens == expected[: len(tokens)]
            return
        assert tokens == expected
        assert finished[0] is reason or reason is None
        assert bool(outputs[-1].error) is (reason is FinishReason.ERROR)
        assert outputs[-1].num_output_tokens == len(tokens) + len(request.resumed_token_ids)
        if request.sampling_params.logprobs is not None:
            assert [logprob.token_id for output in outputs for logprob in output.logprobs] == tokens
        types = self.run.event_types(request_id)
        if types == [EventType.QUEUED, EventType.FINISHED]:
            assert not expected
            assert reason is FinishReason.COMPLETE
            return
        if request.sampling_params.prompt_logprobs is not None:
            positions = [logprob.rank for output in outputs for logprob in output.prompt_logprobs]
            assert positions == list(range(1, len(request.prompt_token_ids)))
            assert outputs[-1].num_cached_tokens == 0
        self.check_events(types, has_output=bool(tokens))

    def check_pooled(self, request: EngineCoreRequest) -> None:
        request_id = request.request_id
        last = self.run.last(request_id)
        if last.finish_reason is FinishReason.ABORT:
            assert request_id in self.aborted
            assert not last.pooled
            return
        self.run.assert_pooled(request)
        self.check_events(self.run.event_types(request_id), has_output=False)

    def check_prefill(self, request: EngineCoreRequest) -> None:
        """It has ended with one output and no token, and never computed its last one."""
        (last,) = self.run.outputs[request.request_id]
        assert not last.new_token_ids
        if last.finish_reason is FinishReason.ABORT:
            assert request.request_id in self.aborted
            return
        assert last.finish_reason is FinishReason.STOP
        assert last.num_output_tokens == len(request.resumed_token_ids)
        types = self.run.event_types(request.request_id)
        if EventType.SCHEDULED in types:
            self.check_events(types, has_output=False)
        else:
            assert types == [EventType.QUEUED, EventType.FINISHED]

    @staticmethod
    def check_events(types: list[EventType], *, has_output: bool) -> None:
        assert types[:2] == [EventType.QUEUED, EventType.SCHEDULED]
        assert types[-1] is EventType.FINISHED
        assert types.count(EventType.FIRST_TOKEN) == has_output
        turns = [event for event in types if event in (EventType.PREEMPTED, EventType.RESUMED)]
        assert all(event is (EventType.RESUMED if i % 2 else EventType.PREEMPTED) for i, event in enumerate(turns))
