"""What a Whisper model is sent for a part of an audio: language, task, and the text before it.

A prompt is `<|startofprev|> text before <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>`, see
`WhisperPrompts` of the contract. Models that know English only have no language and task in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from proa.contract import Audio, SamplingParams, TimestampRules, WhisperPrompts
from proa_gateway.apis.audio.windows import Timestamps, WindowText
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedTask
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.plain_text import marked

Task = Literal["transcribe", "translate"]
ENGLISH = "en"
FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures of the attempts for a window at temperature 0, as OpenAI's Whisper has them."""


@dataclass(frozen=True, slots=True)
class WhisperRequest:
    """What the requests for all windows of an audio share. `language`: empty until the model has found it. `times`:
    what timestamps mean; None: the output has none."""

    prompts: WhisperPrompts
    before: Sequence[int]  # tokens before `<|startoftranscript|>`
    task: Task
    language: str
    max_window: int  # samples of a window
    times: Timestamps | None = None
    temperatures: ClassVar[Sequence[float]] = FALLBACK

    @property
    def must_find_language(self) -> bool:
        """It must be known before the first window's text."""
        return not self.language

    @property
    def suppressed(self) -> Sequence[int]:
        """Tokens that are never sampled."""
        return self.prompts.suppress_tokens

    @property
    def begin_suppressed(self) -> Sequence[int]:
        """Tokens with which no output begins."""
        return self.prompts.begin_suppress_tokens

    def first_prompt(self) -> Prompt:
        """Without audio."""
        return Prompt([*self.before, self.prompts.decoder_start_token_id])

    def prompt(self, audio: Audio) -> Prompt:
        """The prompt of a window, whose language is known."""
        prompts, start = self.prompts, [*self.before, self.prompts.decoder_start_token_id]
        if prompts.is_multilingual:
            start += [prompts.languages[self.language], prompts.tasks[self.task]]
        if prompts.no_timestamps_token_id is not None and self.times is None:
            start.append(prompts.no_timestamps_token_id)
        return Prompt(start, audios=(audio,))

    @property
    def num_prompt_tokens(self) -> int:
        """Of a window's prompt."""
        prompts = self.prompts
        has_last = prompts.no_timestamps_token_id is not None and self.times is None
        return len(self.before) + 1 + 2 * prompts.is_multilingual + has_last

    def markers(self, vocab_size: int) -> frozenset[int]:
        """The tokens of timestamps, which are no text, though models may write them unasked."""
        first = self.prompts.timestamp_begin_id
        return frozenset(range(vocab_size if first is None else first, vocab_size))

    def alignment_prompt(self, audio: Audio, text: Sequence[int]) -> Prompt:
        """The prompt of a window's text, given as tokens, and nothing before it."""
        start = replace(self, before=(), times=None).prompt(audio)
        return replace(start, token_ids=[*start.token_ids, *text])

    def window(self, start: float, duration: float, on_change: Callable[[], None]) -> WindowText:
        return WindowText(start, duration, on_change)

    def language_of(self, window: WindowText) -> str:
        """Its code; empty if it is not known yet."""
        return self.language

    def probe_prompt(self, audio: Audio) -> Prompt:
        """The prompt whose next token is the audio's language."""
        return Prompt([self.prompts.decoder_start_token_id], audios=(audio,))

    def probe_params(self) -> SamplingParams:
        """For the language of an audio, and the log probability that it has no speech."""
        languages, no_speech = tuple(self.prompts.languages.values()), self.prompts.no_speech_token_id
        named = () if no_speech is None else (no_speech,)
        return SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=languages, logprob_token_ids=named)

    def with_timestamps(self, model: ServedModel) -> tuple["WhisperRequest", TimestampRules]:
        """The request whose output has timestamps, and their rules. Raises `UnsupportedTask`."""
        prompts = self.prompts
        if prompts.timestamp_begin_id is None or prompts.no_timestamps_token_id is None:
            raise UnsupportedTask(f"The model {model.name!r} writes no timestamps.", param="response_format")
        rules = TimestampRules(
            begin_id=prompts.timestamp_begin_id,
            no_timestamps_id=prompts.no_timestamps_token_id,
            end_id=min(model.info.eos_token_ids),
            max_initial_index=prompts.max_initial_timestamp_index,
        )
        audios = model.info.audios
        assert audios is not None
        seconds = audios.max_samples / audios.sampling_rate / audios.max_tokens
        return replace(self, times=Timestamps(rules.begin_id, seconds)), rules

    def in_language(self, token_id: int) -> "WhisperRequest":
        """The request in the language of this token."""
        return replace(self, language=next(name for name, id in self.prompts.languages.items() if id == token_id))


async def whisper_request(
    model: ServedModel, prompts: WhisperPrompts, task: Task, language: str | None, text_before: str, max_window: int
) -> WhisperRequest:
    """Raises `InvalidRequest` for a language that the model does not know, `UnsupportedTask` for a task."""
    known = sorted(prompts.languages) if prompts.is_multilingual else [ENGLISH]
    if language is not None and language not in known:
        message = f"The model {model.name!r} does not know the language {language!r}, only {', '.join(known)}."
        raise InvalidRequest(message, param="language")
    if prompts.is_multilingual and task not in prompts.tasks:
        raise UnsupportedTask(f"The model {model.name!r} does not {task}.", param="model")
    if not prompts.is_multilingual and task == "translate":
        raise UnsupportedTask(f"The model {model.name!r} knows English only and does not translate.", param="model")
    default = "" if prompts.is_multilingual else ENGLISH
    before = await _before(model, prompts, text_before)
    return WhisperRequest(prompts, before, task, language or default, max_window)


async def _before(model: ServedModel, prompts: WhisperPrompts, text: str) -> Sequence[int]:
    """The tokens of the text before an audio, of which the last ones fit. Special tokens in it are text."""
    if not text.strip():
        return ()
    if prompts.prev_sot_token_id is None:
        raise InvalidRequest(f"The model {model.name!r} reads no text before an audio.", param="prompt")
    most = prompts.max_target_positions // 2 - 1
    tokenizer = model.tokenizer
    kept = text.strip()[-most * tokenizer.longest_token :]
    plain = marked(tokenizer.special_control_tokens, f" {kept}")
    token_ids = await tokenizer.encode_marked(plain, add_special_tokens=False)
    return [prompts.prev_sot_token_id, *token_ids[-most:]] if most > 0 else ()
