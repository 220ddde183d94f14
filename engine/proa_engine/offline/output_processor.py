"""OutputProcessor: turns the core's token ids into text, matches stop strings and collects logprobs, for offline use.

The gateway does the same for its requests, also with `proa.text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proa.contract import EngineCoreOutput, FinishReason, SamplingParams, TokenLogprobs
from proa.text import TextDelta, TextStream
from proa_engine.core.types import PlainTokens
from proa_engine.offline.outputs import CompletionOutput, Logprob, RequestOutput, logprobs_by_token
from proa_engine.tokenizer import Tokenizer


class NoText:
    """The `TextStream` of an output without text: every token counts at once."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        return TextDelta("", len(token_ids))

    def finish(self, token_ids: Sequence[int], *, stop_token: bool) -> TextDelta:
        return TextDelta("", len(token_ids))


@dataclass(slots=True)
class Choice:
    """One of a request's `n` choices, which is one request to the core.

    Tokens after the first `num_kept` are held back: they may be the start of a stop string.
    """

    core_id: str
    index: int
    stream: TextStream | NoText
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_kept: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, output: EngineCoreOutput) -> None:
        self.token_ids.extend(output.new_token_ids)
        self.logprobs.extend(output.logprobs)
        if output.finish_reason is None:
            self._add_text(self.stream.push(output.new_token_ids))
        else:
            self.finish_reason, self.stop_reason = output.finish_reason.public_name, output.public_stop_reason
            is_stop = output.finish_reason is FinishReason.STOP
            self._add_text(self.stream.finish(output.new_token_ids, stop_token=is_stop))

    def append_plain(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._add_text(self.stream.push((token_id,)))

    def _add_text(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.num_kept += delta.num_tokens
        if delta.stop_string is not None:
            self.finish_reason, self.stop_reason = "stop", delta.stop_string


@dataclass(slots=True, kw_only=True)
class RequestState:
    """An unfinished request and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)


class OutputProcessor:
    """The states of unfinished requests. `tokenizer` None: outputs have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}
        self._choices: dict[str, tuple[RequestState, Choice]] = {}  # by core_id

    def add(self, state: RequestState) -> None:
        self._states[state.request_id] = state
        for choice in state.choices:
            self._choices[choice.core_id] = (state, choice)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def remove(self, request_id: str) -> list[str]:
        """Remove a request and return the core_ids of its unfinished choices, none for an unknown id."""
        if request_id not in self._states:
            return []
        choices = self._states.pop(request_id).choices
        unfinished = [choice.core_id for choice in choices if choice.core_id in self._choices]
        for core_id in unfinished:
            del self._choices[core_id]
        return unfinished

    def make_choice(self, core_id: str, index: int, prompt: Sequence[int], params: SamplingParams) -> Choice:
        """Raises `ValueError` for stop strings if the outputs will have no text."""
        if self._tokenizer is None or not params.detokenize:
            if params.stop:
                raise ValueError("stop strings need a tokenizer and detokenize=True")
            return Choice(core_id, index, NoText())
        stream = TextStream(
            self._tokenizer.vocabulary,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            context=prompt,
        )
        return Choice(core_id, index, stream)

    def process(self, outputs: Sequence[EngineCoreOutput], plain: PlainTokens) -> tuple[list[RequestState], list[str]]:
        """Process a step's outputs. Returns the requests with new output, and the core_ids to abort: those whose text
        ended with a stop string."""
        updated: dict[str, RequestState] = {}
        to_abort: list[str] = []
        for core_id, token_id in zip(plain.request_ids, plain.token_ids, strict=True):
            if core_id in self._choices:
                state, choice = self._choices[core_id]
                choice.append_plain(token_id)
                updated[state.request_id] = state
                if choice.is_finished:
                    del self._choices[core_id]
                    to_abort.append(core_id)
        for output in outputs:
            if output.request_id not in self._choices:  # ended by a stop string or aborted
                continue
            state, choice = self._choices[output.request_id]
            choice.append(output)
            if choice.index == 0:
                state.prompt_logprobs.extend(output.prompt_logprobs)
                state.num_cached_tokens = output.num_cached_tokens or 0
            updated[state.request_id] = state
            if choice.is_finished:
                del self._choices[choice.core_id]
                if not output.is_finished:
                    to_abort.append(choice.core_id)
        for state in updated.values():
            if state.finished:
                del self._states[state.request_id]
        return list(updated.values()), to_abort

    def make_output(self, state: RequestState) -> RequestOutput:
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if state.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(logprobs_by_token(entry, self._tokenizer) for entry in state.prompt_logprobs)]
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(choice, state.params) for choice in state.choices],
            finished=state.finished,
            num_cached_tokens=state.num_cached_tokens,
        )

    def _completion(self, choice: Choice, params: SamplingParams) -> CompletionOutput:
        kept = choice.logprobs[: choice.num_kept]
        wants_logprobs = params.logprobs is not None
        return CompletionOutput(
            index=choice.index,
            text=choice.text,
            token_ids=choice.token_ids[: choice.num_kept],
            cumulative_logprob=sum(entry.logprob for entry in kept) if wants_logprobs else None,
            logprobs=[logprobs_by_token(entry, self._tokenizer) for entry in kept] if wants_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
