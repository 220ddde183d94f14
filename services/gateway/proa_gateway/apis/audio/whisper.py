"""What a Whisper model is sent for a part of an audio: language, task, and the text before it.

A prompt is `<|startofprev|> text before <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>`, see
`WhisperPrompts` of the contract. Models that know English only have no language and task in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from proa.contract import SamplingParams, TimestampRules, WhisperPrompts
from proa_gateway.apis.audio.windows import Timestamps
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedTask
from proa_gateway.serving.plain_text import marked

Task = Literal["transcribe", "translate"]
ENGLISH = "en"


@dataclass(frozen=True, slots=True)
class WhisperRequest:
    """What the requests for all windows of an audio share. `language`: empty until the model has found it. `times`:
    what timestamps mean; None: the output has none."""

    prompts: WhisperPrompts
    before: Sequence[int]  # tokens before `<|startoftranscript|>`
    task: Task
    language: str
    times: Timestamps | None = None

    def prompt(self) -> list[int]:
        """The prompt of a window, whose language is known."""
        prompts, start = self.prompts, [*self.before, self.prompts.decoder_start_token_id]
        if prompts.is_multilingual:
            start += [prompts.languages[self.language], prompts.tasks[self.task]]
        if prompts.no_timestamps_token_id is not None and self.times is None:
            start.append(prompts.no_timestamps_token_id)
        return start

    @property
    def num_prompt_tokens(self) -> int:
        """Of a window's prompt."""
        prompts = self.prompts
        has_last = prompts.no_timestamps_token_id is not None and self.times is None
        return len(self.before) + 1 + 2 * prompts.is_multilingual + has_last

    def timestamps(self, vocab_size: int) -> frozenset[int]:
        """The tokens of timestamps, which are no text, though models may write them unasked."""
        first = self.prompts.timestamp_begin_id
        return frozenset(range(vocab_size if first is None else first, vocab_size))

    def alignment_prompt(self, text: Sequence[int]) -> list[int]:
        """The prompt of a window's text, given as tokens, and nothing before it."""
        return [*replace(self, before=(), times=None).prompt(), *text]

    def probe_prompt(self) -> list[int]:
        """The prompt whose next token is the audio's language."""
        return [self.prompts.decoder_start_token_id]

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
    model: ServedModel, prompts: WhisperPrompts, task: Task, language: str | None, text_before: str
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
    return WhisperRequest(prompts, await _before(model, prompts, text_before), task, language or default)


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
