"""Bench: a loaded offline engine and the workloads that it is timed on."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A request of random tokens."""

    prompt: list[int]
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the workloads, in tokens unless noted."""

    mixed_requests: int  # number of requests
    mixed: tuple[int, int]  # shortest and longest, of prompts and of outputs
    context: int  # prompt of a request whose decode is timed
    decode_steps: int  # number of steps
    rounds: int  # number of timed prefills
    closed: tuple[int, int]  # prompt and output of a closed loop's requests
    closed_turns: int  # requests of each client
    image: tuple[int, int]  # width and height of an image, in pixels
    image_outputs: int  # output of a request with an image


FULL = Sizes(
    mixed_requests=256,
    mixed=(100, 1024),
    context=512,
    decode_steps=96,
    rounds=5,
    closed=(128, 1024),
    closed_turns=2,
    image=(640, 480),
    image_outputs=107,
)
SMALL = Sizes(
    mixed_requests=3,
    mixed=(2, 5),
    context=8,
    decode_steps=6,
    rounds=1,
    closed=(4, 5),
    closed_turns=1,
    image=(64, 32),
    image_outputs=4,
)  # only to check that everything runs
_WARM_UP_STEPS = 8
_QUESTION = 64  # tokens of text in a prompt with an image
_PLAIN_TOKENS = 256  # ids below this one are of text
_LOOP = 16  # length of the token sequence that a repetitive prompt repeats


class Figure(NamedTuple):
    value: float
    unit: str
    note: str = ""


def closed_jobs(clients: int, vocab_size: int, sizes: Sizes) -> list[Job]:
    """The requests of a closed loop, the same over HTTP and offline."""
    draw = random.Random(clients)
    prompt, outputs = sizes.closed
    return [Job(draw.choices(range(vocab_size), k=prompt), outputs) for _ in range(clients * sizes.closed_turns)]


class Bench:
    """`arguments` are those of `LLM`."""

    def __init__(self, folder: Path, arguments: dict[str, Any], *, vocab_size: int, sizes: Sizes) -> None:
        from proa_engine import LLM

        self._engine = LLM(str(folder), **arguments).llm_engine
        self._sizes = sizes
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._num_requests = 0

    def run(self, workload: str) -> Figure:
        kind, _, size = workload.partition("-")
        if kind == "mixed":
            return self.mixed()
        if kind == "prefill":
            return self.prefill(*map(int, size.split("x")))
        if kind == "batch":
            return self.batch(*map(int, size.split("x")))
        works: dict[str, Callable[[int], Figure]]
        works = {"decode": self.decode, "closed": self.closed, "repetitive": self.repetitive}
        works["images"] = self.images
        return works[kind](int(size))

    def mixed(self) -> Figure:
        draw, count = self._random.randint, self._sizes.mixed_requests
        return self._throughput([(draw(*self._sizes.mixed), draw(*self._sizes.mixed)) for _ in range(count)])

    def batch(self, count: int, prompt: int, outputs: int) -> Figure:
        return self._throughput([(prompt, outputs)] * count)

    def _throughput(self, lengths: Sequence[tuple[int, int]]) -> Figure:
        """Output tokens a second of requests at once, with these numbers of tokens in their prompts and outputs."""
        self._add(self._job(prompt, _WARM_UP_STEPS) for prompt, _ in lengths[:16])
        self.drain()
        self._add(self._job(*each) for each in lengths)
        seconds = timed(self.drain)
        return Figure(sum(outputs for _, outputs in lengths) / seconds, "tokens/s")

    def decode(self, batch: int) -> Figure:
        steps = self._sizes.decode_steps
        with self.decoding(batch):
            seconds = timed(lambda: self.step(steps))
            running = self._engine._core.stats().num_running_reqs
        note = "" if running == batch else f"the KV cache holds {running} of {batch}"
        return Figure(seconds / steps * 1e3, "ms a step", note)

    @contextmanager
    def decoding(self, batch: int) -> Iterator[None]:
        """`batch` requests after their prefill, with enough tokens left for the timed steps."""
        names = self._add(self._job(self._sizes.context, self._sizes.decode_steps + 64) for _ in range(batch))
        self._await_first_tokens(names)
        self.step(_WARM_UP_STEPS)
        yield
        self._engine.abort_request(names)
        self.drain()

    def prefill(self, count: int, length: int) -> Figure:
        rounds = [self.prefill_once(count, length) for _ in range(1 + self._sizes.rounds)]
        return Figure(statistics.median(rounds[1:]) * 1e3, "ms")

    def prefill_once(self, count: int, length: int) -> float:
        """Seconds until all prompts have their first token."""
        self._add(self._job(length, 1) for _ in range(count))
        return timed(self.drain)

    def closed(self, clients: int) -> Figure:
        """A closed loop: each client sends its next request when the last one is finished."""
        jobs = closed_jobs(clients, self._vocab_size, self._sizes)
        waiting = iter(jobs)
        started = time.perf_counter()
        self._add(job for _, job in zip(range(clients), waiting, strict=False))
        while self._engine.has_unfinished_requests():
            for _ in self._engine.step(only_finished=True):
                self._add(job for _, job in zip(range(1), waiting, strict=False))
        seconds = time.perf_counter() - started
        return Figure(sum(job.num_outputs for job in jobs) / seconds, "tokens/s")

    def repetitive(self, batch: int) -> Figure:
        """One token again and again, so that every n-gram draft token is accepted."""
        outputs = self._sizes.decode_steps
        loop = self._random.choices(range(self._vocab_size), k=_LOOP)
        prompt = (loop * (self._sizes.context // _LOOP + 1))[: self._sizes.context]
        self._await_first_tokens(
            self._add([Job(prompt, outputs)] * batch, temperature=0.0, allowed_token_ids=(loop[0],))
        )
        started, steps = time.perf_counter(), 0
        while self._engine.has_unfinished_requests():
            self.step(1)
            steps += 1
        milliseconds = (time.perf_counter() - started) / (outputs - 1) * 1e3
        return Figure(milliseconds, "ms a token", f"{(outputs - 1) / steps:.2f} tokens a step")

    def images(self, count: int) -> Figure:
        """Requests with an image each, all different, at once."""
        from PIL import Image

        from proa_engine import SamplingParams

        width, height = self._sizes.image
        model = self._engine.limits.images
        assert model is not None
        params = SamplingParams(
            temperature=0.6, max_tokens=self._sizes.image_outputs, ignore_eos=True, detokenize=False
        )
        prepared = []
        for _ in range(count):
            self._num_requests += 1
            image = Image.frombytes("RGB", (width, height), self._random.randbytes(width * height * 3))
            token_ids = [*self._random.choices(range(_PLAIN_TOKENS), k=_QUESTION), model.token_id]
            prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": image}}
            prepared.append(self._engine.prepare(str(self._num_requests), prompt, params, 0, 0.0))
        started = time.perf_counter()
        for state, requests in prepared:
            self._engine.submit(state, requests)
        self.drain()
        return Figure(count / (time.perf_counter() - started), "requests/s")

    def step(self, count: int) -> None:
        for _ in range(count):
            self._engine.step(only_finished=True)

    def drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step(only_finished=True)

    def _await_first_tokens(self, names: Sequence[str]) -> None:
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}

    def _job(self, prompt: int, outputs: int) -> Job:
        return Job(self._random.choices(range(self._vocab_size), k=prompt), outputs)

    def _add(self, jobs: Iterator[Job] | Sequence[Job], **sampling: Any) -> list[str]:
        """Add requests; returns their ids."""
        from proa_engine import SamplingParams

        names = []
        for job in jobs:
            self._num_requests += 1
            names.append(str(self._num_requests))
            options = {"temperature": 0.6, "max_tokens": job.num_outputs, "ignore_eos": True, "detokenize": False}
            self._engine.add_request(names[-1], {"prompt_token_ids": job.prompt}, SamplingParams(**options | sampling))
        return names


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
