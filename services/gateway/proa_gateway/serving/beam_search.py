"""Beam search over HTTP, by the rules of `proa.beam_search`: the fields, and the job in place of a `GenerationJob`.

In each step every beam of all prompts is an engine request for one token, whose prompt is the beam so far. Engines
share the blocks that beams have in common through their prefix caches. A step whose engine is lost is sent to another
engine, as any request that has no token yet.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from pydantic import BaseModel, Field

from proa.beam_search import MAX_LENGTH_PENALTY, Beam, BeamSearch, BeamSearchParams
from proa.contract import EngineCoreOutput, EventType, FinishReason, SamplingParams, TokenLogprobs
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import (
    EngineUnavailable,
    GatewayError,
    GenerationFailed,
    GrammarFailed,
    InvalidRequest,
    UnsupportedField,
)
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.text import EngineSequence, FinishName, OutputProcessor, SequenceListener
from proa_gateway.routing.policies import RoutingHints
from proa_gateway.serving.choices import ChoiceCollector, Prompt
from proa_gateway.serving.generation_job import GenerationJob, collectors_of, final_usage
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.job import Running

# Fields that decide which tokens an output may have, or where it ends. Beams are ranked by the model's own
# probabilities, so that these would be ignored; vLLM ignores them.
_REFUSED = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "logit_bias",
    "logprob_token_ids",
    "min_tokens",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_detection",
    "stop",
    "stop_token_ids",
    "stream",
)


class BeamSearchFields(BaseModel):
    """The fields of endpoints with beam search, beside those of `GenerationRequest`."""

    use_beam_search: bool | None = Field(None, description="`n` is the number of beams. The response is not streamed.")
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = Field(
        None, description="Of a beam search: the exponent of the length by which log probabilities are divided."
    )


def check_beam_search(request: GenerationRequest) -> None:
    """Check the fields of a request with `use_beam_search`. Raises `UnsupportedField`."""
    if request.repetition_penalty not in (None, 1.0):
        raise _unsupported("repetition_penalty")
    for name in _REFUSED:
        if getattr(request, name):
            raise _unsupported(name)


def beam_search_job(job: GenerationJob, request: BeamSearchFields, model: ServedModel) -> "BeamSearchJob":
    """The job of a request with `use_beam_search`. Raises `InvalidRequest` and `UnsupportedField`."""
    info, params, most = model.info, job.params[0], model.info.max_logprobs // 2
    if job.constraint is not None:
        raise _unsupported(job.constraint.param or "structured_outputs")
    if params.prompt_logprobs is not None:  # of completions with echo
        raise _unsupported("echo with logprobs")
    if len(job.params) > most:
        message = (
            f"n must not be above {most} with use_beam_search, got {len(job.params)}; half of the engine's "
            "--max-logprobs limits it."
        )
        raise InvalidRequest(message, param="n")
    length_penalty = request.length_penalty
    return BeamSearchJob(
        **{each.name: getattr(job, each.name) for each in fields(job)},
        search=BeamSearchParams(
            beam_width=len(job.params),
            max_tokens=info.max_model_len if params.max_tokens is None else params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if length_penalty is None else length_penalty,
        ),
        eos_token_ids=frozenset(info.eos_token_ids),
        max_model_len=info.max_model_len,
    )


def _unsupported(name: str) -> UnsupportedField:
    return UnsupportedField(f"{name} is not supported with use_beam_search.", param=name.partition(" ")[0])


class _Results:
    """The choices of one prompt. Until they are known, each counts a token for each step."""

    def __init__(self, search: BeamSearch, choices: Sequence[ChoiceCollector], sequences: Sequence[OutputProcessor]):
        self.search = search
        self.choices = choices
        self.sequences = sequences

    def count_step(self, num_cached_tokens: int) -> None:
        """`num_cached_tokens`: of the first beam's prompt."""
        if self.search.num_steps_done == 1:
            self.sequences[0].num_cached_tokens = num_cached_tokens
        for sequence in self.sequences:
            sequence.num_tokens += 1

    def finish(self, num_logprobs: int) -> tuple[Sequence[ChoiceCollector], Sequence[OutputProcessor]]:
        """Give the choices their outputs. Return those that have one, all but for tiny vocabularies, and their
        sequences."""
        beams = self.search.best()
        for beam, sequence in zip(beams, self.sequences, strict=False):
            sequence.num_tokens = 0
            sequence.output(
                EngineCoreOutput(
                    new_token_ids=beam.token_ids,
                    logprobs=[_with_tops(entry, num_logprobs) for entry in beam.logprobs],
                    finish_reason=FinishReason.LENGTH if beam.eos_token_id is None else FinishReason.STOP,
                    stop_reason=beam.eos_token_id,
                )
            )
        return self.choices[: len(beams)], self.sequences[: len(beams)]


class _NoListener:
    """The `SequenceListener` of outputs that come whole."""

    def started(self, sequence: EngineSequence) -> None: ...

    def ended(self, sequence: EngineSequence) -> None: ...

    def draining(self, sequence: EngineSequence) -> None: ...

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None: ...


class NextToken:
    """The `EngineSequence` of one beam in one step. `entry`: log probabilities of the next token, once it has ended.

    The token itself is not used, so it does not count, and after a failure the next engine computes it again.
    """

    received: Sequence[int] = ()
    num_tokens = 0
    reasoning_tokens = None
    times: Mapping[EventType, float] = {}

    def __init__(self, listener: SequenceListener) -> None:
        self._listener = listener
        self.entry: TokenLogprobs | None = None
        self.num_cached_tokens = 0  # of the beam so far, prompt included
        self.finish_reason: FinishName | None = None

    def token(self, token_id: int) -> None:
        """Not called: a token with log probabilities comes as an output."""

    def output(self, output: EngineCoreOutput) -> None:
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if output.logprobs:
            self.entry = output.logprobs[0]
        match output.finish_reason:
            case None:
                return
            case FinishReason.ERROR:
                self._listener.failed(self, GrammarFailed(output.error), retryable=False)
            case FinishReason.ABORT:
                self._listener.failed(self, EngineUnavailable("the engine aborted the request"), retryable=True)
            case _ if self.entry is None:
                self._listener.failed(self, GenerationFailed("the engine sent no log probabilities"), retryable=False)
            case _:
                self._listener.started(self)
                self.finish_reason = "stop"
                self._listener.ended(self)

    def draining(self) -> None:
        """The engine computes what it has begun."""

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        self._listener.failed(self, error, retryable=retryable)


@dataclass(frozen=True, kw_only=True)
class BeamSearchJob(GenerationJob):
    """The choices of a prompt are the best outputs, the best first."""

    search: BeamSearchParams
    eos_token_ids: frozenset[int]
    max_model_len: int  # of prompt and output together

    async def run(self, running: Running, writer: ResponseWriter) -> None:
        accepted = running.accepted
        renderer = self.renderer(accepted.id, int(accepted.created))
        width = self.search.beam_width
        prompts = [prompt for prompt in self.prompts for _ in range(width)]
        choices = collectors_of(prompts, renderer)
        sequences = [
            self.processor(prompt, choice, _NoListener(), wants_tokens=renderer.wants_tokens, running=running)
            for prompt, choice in zip(prompts, choices, strict=True)
        ]
        running.sequences[:] = sequences
        results = [
            _Results(self._new_search(prompt), choices[start : start + width], sequences[start : start + width])
            for prompt, start in zip(self.prompts, range(0, len(prompts), width), strict=True)
        ]
        with accepted.trace.span("beam_search"):
            await self._search(results, running)
        finished = [each.finish(self.params[0].logprobs or 0) for each in results]
        running.sequences[:] = [sequence for _, found in finished for sequence in found]
        outputs = [choice.output() for found, _ in finished for choice in found]
        await writer.send_json(renderer.body(outputs, final_usage(running)))

    def _new_search(self, prompt: Prompt) -> BeamSearch:
        return BeamSearch(
            self.search,
            num_prompt_tokens=len(prompt.token_ids),
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )

    async def _search(self, results: Sequence[_Results], running: Running) -> None:
        """Step all searches together until each has ended."""
        generation = running.generation
        count = max(self.search.num_logprobs, self.params[0].logprobs or 0)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=count, ignore_eos=True, key=0)
        # A session of their own keeps the beams of a prompt together where the policy knows nothing of their blocks.
        session_id = running.accepted.id
        hints = [replace(each, session_id=each.session_id or session_id) for each in running.prepared.hints]
        indices = itertools.count()
        while any(not each.search.is_finished for each in results):
            sent: list[NextToken] = []
            for prompt, hint in self._beams(results, hints):
                request = running.engine_request(next(indices), prompt, sampling_params=params)
                sent.append(NextToken(generation))
                generation.add(sent[-1], request, hint)
            generation.start()
            while not generation.finished:
                await generation.wait()
            answers = iter(sent)
            for each in results:
                if each.search.is_finished:
                    continue
                answered = [next(answers) for _ in each.search.beams]
                each.search.advance([answer.entry for answer in answered if answer.entry is not None])
                each.count_step(answered[0].num_cached_tokens)

    def _beams(
        self, results: Sequence[_Results], hints: Sequence[RoutingHints]
    ) -> Iterator[tuple[Prompt, RoutingHints]]:
        """The prompts of the next step."""
        for prompt, each, hint in zip(self.prompts, results, hints, strict=True):
            if not each.search.is_finished:
                for beam in each.search.beams:
                    yield _continued(prompt, beam), hint


def _continued(prompt: Prompt, beam: Beam) -> Prompt:
    return replace(prompt, token_ids=[*prompt.token_ids, *beam.token_ids])


def _with_tops(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        entry.token_id, entry.logprob, entry.rank, entry.top_token_ids[:count], entry.top_logprobs[:count]
    )
