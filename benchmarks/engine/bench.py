"""Bench: a loaded offline engine and the workloads that it is timed on.

What another engine must do to be compared is in same_work.json, which needs nothing to be read: the lengths of `mixed`,
the tokens of a decode, the requests of a closed loop, and how tokens are sampled.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from proa_engine import LoRARequest


class Job(NamedTuple):
    """A request of random tokens."""

    prompt: list[int]
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the workloads, in tokens unless noted."""

    mixed: Sequence[tuple[int, int]]  # prompt and output of each request
    context: int  # prompt of a request whose decode is timed
    decode_after: int  # its outputs before the timed steps
    decode_steps: int  # number of steps
    rounds: int  # number of timed runs of prefills and of `mixed`
    closed: tuple[int, int]  # prompt and output of a closed loop's requests
    closed_turns: int  # requests of each client
    image: tuple[int, int]  # width and height of an image, in pixels
    image_outputs: int  # output of a request with an image


SAME_WORK: Mapping[str, Any] = json.loads(Path(__file__).with_name("same_work.json").read_text())
PLAIN: Mapping[str, Any] = SAME_WORK["sampling"]["plain"]
OWN = "own-"  # of a workload's name: tokens are sampled as the model's generation_config.json says
GRAMMAR = "grammar-"  # needs a tokenizer, whose tokens are numbers in words (`real_shapes.write_tokenizer`)
# By the beginning of a workload's name: sampling that is not part of the CUDA graphs of decodes.
UNCAPTURED: Mapping[str, Mapping[str, Any]] = {
    "penalties-": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs-": {"logprobs": 5},
    GRAMMAR: {"structured_outputs": "( ?[0-9])*z"},  # a regular expression that no token of it ends
}
FULL = Sizes(
    mixed=[(prompt, outputs) for prompt, outputs in SAME_WORK["mixed"]],
    context=SAME_WORK["decode"]["prompt"],
    decode_after=SAME_WORK["decode"]["before"],
    decode_steps=SAME_WORK["decode"]["steps"],
    rounds=3,
    closed=(SAME_WORK["closed"]["prompt"], SAME_WORK["closed"]["outputs"]),
    closed_turns=SAME_WORK["closed"]["requests_of_each_client"],
    image=(640, 480),
    image_outputs=107,
)
SMALL = Sizes(
    mixed=[(2, 5), (4, 3), (5, 2)],
    context=8,
    decode_after=2,
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
    """`runs`: the values whose median it is. `context`: of a decode, mean number of tokens that are attended to."""

    value: float
    unit: str
    note: str = ""
    runs: Sequence[float] = ()
    context: float | None = None

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value not in ((), None)}


def own_sampling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sampling parameters that models of this architecture have in their generation_config.json. Raises
    `ValueError` if they are not known here."""
    [architecture] = config["architectures"]
    for family, sampling in SAME_WORK["sampling"].items():
        if architecture.startswith(family):
            return dict(sampling)
    raise ValueError(f"same_work.json has no sampling parameters of {architecture}")


def split_sampling(workload: str) -> tuple[str, str]:
    """The beginning of a workload's name that says how tokens are sampled, empty if they are plainly, and the rest."""
    prefix = next((each for each in (OWN, *UNCAPTURED) if workload.startswith(each)), "")
    return prefix, workload.removeprefix(prefix)


def closed_jobs(clients: int, vocab_size: int, sizes: Sizes) -> list[Job]:
    """The requests of a closed loop, the same over HTTP and offline."""
    draw = random.Random(clients)
    prompt, outputs = sizes.closed
    return [Job(draw.choices(range(vocab_size), k=prompt), outputs) for _ in range(clients * sizes.closed_turns)]


class Bench:
    """`arguments` are those of `LLM`, `config` is the model's config.json."""

    def __init__(self, folder: Path, arguments: dict[str, Any], config: Mapping[str, Any], sizes: Sizes) -> None:
        from proa_engine import LLM

        self._engine = LLM(str(folder), **arguments).llm_engine
        self._sizes = sizes
        self._random = random.Random(0)
        self._config = config
        self._vocab_size = vocab_size(config)
        self._sampling: Mapping[str, Any] = PLAIN
        self._adapters: Sequence[LoRARequest | None] = [None]  # requests have them in turn
        self._num_requests = 0

    def run(self, workload: str) -> Figure:
        kind, _, size = self.sample_as(workload).partition("-")
        if kind == "mixed":
            return self.mixed()
        if kind == "prefill":
            return self.prefill(*map(int, size.split("x")))
        if kind == "batch":
            return self.batch(*map(int, size.split("x")))
        works: dict[str, Callable[[int], Figure]]
        works = {"decode": self.decode, "closed": self.closed, "repetitive": self.repetitive}
        works |= {"images": self.images, "adapters": self.adapters}
        return works[kind](int(size))

    def sample_as(self, workload: str) -> str:
        """Let the requests to come be sampled as a workload's name says. Returns the rest of the name."""
        from proa_engine import StructuredOutputsParams

        prefix, rest = split_sampling(workload)
        if prefix == OWN:
            self._sampling = own_sampling(self._config)
        else:
            more = dict(UNCAPTURED.get(prefix, {}))
            if regex := more.pop("structured_outputs", None):
                more["structured_outputs"] = StructuredOutputsParams(regex=regex)
            self._sampling = {**PLAIN, **more}
        return rest

    def mixed(self) -> Figure:
        return self._throughput(self._sizes.mixed, self._sizes.rounds)

    def batch(self, count: int, prompt: int, outputs: int) -> Figure:
        return self._throughput([(prompt, outputs)] * count, 1)

    def _throughput(self, lengths: Sequence[tuple[int, int]], rounds: int) -> Figure:
        """Output tokens a second of requests at once, with these numbers of tokens in their prompts and outputs."""
        self._run_all([self._job(prompt, _WARM_UP_STEPS) for prompt, _ in lengths[:16]])
        seconds = [self._run_all([self._job(*each) for each in lengths]) for _ in range(rounds)]
        return median_figure([sum(outputs for _, outputs in lengths) / each for each in seconds], "tokens/s")

    def decode(self, batch: int) -> Figure:
        steps = self._sizes.decode_steps
        with self.decoding(batch) as context:
            seconds = timed(lambda: self.step(steps))
            running = self._engine._core.stats().num_running_reqs
        note = "" if running == batch else f"the KV cache holds {running} of {batch}"
        return Figure(seconds / steps * 1e3, "ms a step", note, context=context + (steps - 1) / 2)

    @contextmanager
    def decoding(self, batch: int) -> Iterator[float]:
        """`batch` requests after their prefill and some outputs, with enough tokens left for the timed steps. Yields
        how many tokens the next step attends to, on average.

        Their prompts are computed first and then found in the prefix cache, so that all begin in the same step.
        """
        jobs = [self._job(self._sizes.context, self._sizes.decode_steps + 64) for _ in range(batch)]
        self._run_all([Job(job.prompt, 1) for job in jobs])
        names = self._add(jobs)
        counts = self._await_outputs(names, self._sizes.decode_after)
        yield self._sizes.context + statistics.mean(counts)
        self._engine.abort_request(names)
        self.drain()

    def adapters(self, batch: int) -> Figure:
        """A decode whose requests have adapters in turn, of all linear layers."""
        from benchmarks.engine.lora import NUM_ADAPTERS, RANK, write_adapter
        from proa_engine import LoRARequest

        with tempfile.TemporaryDirectory() as name:
            folders = [write_adapter(Path(name) / str(number), self._config, RANK) for number in range(NUM_ADAPTERS)]
            self._adapters = [LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, start=1)]
            figure = self.decode(batch)
        self._adapters = [None]
        return figure

    def prefill(self, count: int, length: int, rounds: int | None = None) -> Figure:
        """`rounds`: timed runs (default: of the sizes)."""
        runs = [self.prefill_once(count, length) * 1e3 for _ in range(1 + (rounds or self._sizes.rounds))]
        return median_figure(runs[1:], "ms")

    def prefill_once(self, count: int, length: int) -> float:
        """Seconds from before the prompts are added until all have their first token."""
        return self._run_all([self._job(length, 1) for _ in range(count)])

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
        self._await_outputs(self._add([Job(prompt, outputs)] * batch, temperature=0.0, allowed_token_ids=(loop[0],)), 1)
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
        options: dict[str, Any] = {"max_tokens": self._sizes.image_outputs, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(**self._sampling, **options)
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

    def _await_outputs(self, names: Sequence[str], count: int) -> list[int]:
        """Step until each has at least `count` tokens; returns how many each has."""
        tokens = dict.fromkeys(names, 0)
        while min(tokens.values()) < count:
            tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}
        return list(tokens.values())

    def _run_all(self, jobs: Sequence[Job]) -> float:
        """Add them and step until all have ended. Returns the seconds: as of `LLM.generate`, from before the first one
        is added."""

        def run() -> None:
            self._add(jobs)
            self.drain()

        return timed(run)

    def _job(self, prompt: int, outputs: int) -> Job:
        return Job(self._random.choices(range(self._vocab_size), k=prompt), outputs)

    def _add(self, jobs: Iterable[Job], **sampling: Any) -> list[str]:
        """Add requests; returns their ids."""
        from proa_engine import SamplingParams

        names = []
        for job in jobs:
            self._num_requests += 1
            names.append(str(self._num_requests))
            options: dict[str, Any] = {"max_tokens": job.num_outputs, "ignore_eos": True, "detokenize": False}
            params = SamplingParams(**{**self._sampling, **options, **sampling})
            adapter = self._adapters[self._num_requests % len(self._adapters)]
            self._engine.add_request(names[-1], {"prompt_token_ids": job.prompt}, params, lora_request=adapter)
        return names


def median_figure(runs: Sequence[float], unit: str) -> Figure:
    return Figure(statistics.median(runs), unit, runs=[round(each, 3) for each in runs] if len(runs) > 1 else ())


def vocab_size(config: Mapping[str, Any]) -> int:
    size: int = config.get("text_config", config)["vocab_size"]
    return size


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
