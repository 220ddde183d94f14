"""What a model that transcribes by its chat template is sent for a part of an audio, as Qwen's library for Qwen3-ASR
sends it.

The system's message is the text before the audio, the user's message is the audio, and the answer begins with the
language, see `AsrPrompts` of the contract.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from proa.chat_template import ChatTemplateTooCostly
from proa.contract import AsrPrompts, Audio, AudioInput
from proa_gateway.apis.audio.windows import WindowText
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedTask
from proa_gateway.serving.chat_prompt import render_prompt, template_messages
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.content import AudioPart, ContentFormat
from proa_gateway.serving.conversation import ChatMessage, Conversation
from proa_gateway.serving.plain_text import plain_conversation
from proa_gateway.serving.prompt import check_text_fits

MAX_SECONDS = 30  # of a window, as Whisper's: longer ones run less side by side


@dataclass(frozen=True, slots=True)
class AsrRequest:
    """What the requests for all windows of an audio share. `language`: empty if each window's output begins with it."""

    input: AudioInput
    prompts: AsrPrompts
    before: Sequence[int]  # tokens before the audio's
    after: Sequence[int]
    language: str
    max_window: int  # samples of a window
    task: ClassVar[Literal["transcribe"]] = "transcribe"
    times: ClassVar[None] = None
    must_find_language: ClassVar[bool] = False
    temperatures: ClassVar[Sequence[float]] = (0.0,)
    suppressed: ClassVar[Sequence[int]] = ()
    begin_suppressed: ClassVar[Sequence[int]] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Of the longest window's prompt."""
        return len(self.before) + self.input.num_tokens(self.max_window) + len(self.after)

    def first_prompt(self) -> Prompt:
        """Without audio."""
        return Prompt([*self.before, *self.after])

    def prompt(self, audio: Audio) -> Prompt:
        """The prompt of a window."""
        count = self.input.num_tokens(audio.num_samples)
        placed = replace(audio, offset=len(self.before), num_tokens=count)
        return Prompt([*self.before, *[self.input.token_id] * count, *self.after], audios=(placed,))

    def markers(self, vocab_size: int) -> frozenset[int]:
        """Tokens that are no text."""
        return frozenset((self.prompts.marker_id,))

    def window(self, start: float, duration: float, on_change: Callable[[], None]) -> WindowText:
        text_begin = None if self.language else self.prompts.marker_id
        return WindowText(start, duration, on_change, text_begin)

    def language_of(self, window: WindowText) -> str:
        """Its code; empty if it is not known."""
        name = window.preamble.strip().rpartition(" ")[2]
        return self.language or next((code for code, each in self.prompts.languages.items() if each == name), "")


async def asr_request(
    model: ServedModel,
    input: AudioInput,
    prompts: AsrPrompts,
    language: str | None,
    text_before: str,
    content_format: ContentFormat,
) -> AsrRequest:
    """`language`: a code or a name. Raises `InvalidRequest` for one that the model does not know, and
    `UnsupportedTask` for a model whose chat template writes no audio."""
    code = _code(model, prompts, language) if language is not None else ""
    template = model.tokenizer.template_for(tools=False)
    if template is None:
        reason = model.tokenizer.template_error or "there is none"
        raise UnsupportedTask(f"The chat template of the model {model.name!r} cannot be used: {reason}", param="model")
    messages = [
        ChatMessage.model_construct(role="system", content=text_before.strip()),
        ChatMessage.model_construct(role="user", content=[AudioPart("")]),
    ]
    plain = plain_conversation(Conversation(messages=messages), model.tokenizer)
    renderer, read = model.tokenizer.templates, template_messages(plain.messages)
    try:
        text = await render_prompt(plain, read, template, renderer, content_format, placeholder=input.placeholder)
    except ChatTemplateTooCostly as error:
        message = f"The chat template of the model {model.name!r} was stopped: {error}."
        raise InvalidRequest(message, param="prompt") from error
    await check_text_fits(text, model, model.info.max_model_len, "prompt")
    parts = text.split(input.placeholder)
    if len(parts) != 2:
        raise UnsupportedTask(f"The chat template of the model {model.name!r} writes no audio.", param="model")
    start = f"language {prompts.languages[code]}{prompts.marker}" if code else ""
    before, after = parts[0] + input.prefix, input.suffix + parts[1] + start
    first = await model.tokenizer.encode_marked(before, add_special_tokens=False)
    last = await model.tokenizer.encode_marked(after, add_special_tokens=False)
    room = (model.info.max_model_len - len(first) - len(last)) // 2  # of an audio's tokens; half is for its text
    sizes = (min(input.max_samples, each * input.sampling_rate) for each in range(MAX_SECONDS, 0, -1))
    window = next((each for each in sizes if input.num_tokens(each) <= room), input.sampling_rate)
    return AsrRequest(input, prompts, first, last, code, window)


def _code(model: ServedModel, prompts: AsrPrompts, language: str) -> str:
    known = prompts.languages
    for code, name in known.items():
        if language.strip().lower() in (code, name.lower()):
            return code
    message = f"The model {model.name!r} does not know the language {language!r}, only {', '.join(sorted(known))}."
    raise InvalidRequest(message, param="language")
