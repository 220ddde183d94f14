"""Real Whisper models in `transformers`, in float32: what they make of the windows that Proa's gateway cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proa_gateway.audio.decode import Samples

RATE = 16_000
WINDOW = 30 * RATE
TOKEN_SECONDS = 0.02  # of the encoder


@dataclass(frozen=True)
class TimedWord:
    text: str
    start: float  # seconds, as is `end`
    end: float

    def later(self, seconds: float) -> "TimedWord":
        return TimedWord(self.text, self.start + seconds, self.end + seconds)


@dataclass(frozen=True)
class Reference:
    """A model in `transformers`, of which a window of samples is asked."""

    folder: Path

    @cached_property
    def model(self) -> Any:
        from transformers import WhisperForConditionalGeneration

        model = WhisperForConditionalGeneration.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()

    @cached_property
    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def is_multilingual(self) -> bool:
        return bool(self.model.generation_config.is_multilingual)

    def features(self, samples: Samples) -> torch.Tensor:
        from transformers import WhisperFeatureExtractor

        extractor = WhisperFeatureExtractor.from_pretrained(self.folder)
        features: torch.Tensor = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return features

    def language(self, samples: Samples) -> str:
        """Its code."""
        if not self.is_multilingual:
            return "en"
        (token_id,) = self.model.detect_language(self.features(samples)).tolist()
        return str(self.tokenizer.id_to_token(token_id)).strip("<|>")

    def prompt(self, language: str, *, has_timestamps: bool) -> list[int]:
        config = self.model.generation_config
        prompt = [config.decoder_start_token_id]
        if self.is_multilingual:
            prompt += [config.lang_to_id[f"<|{language}|>"], config.task_to_id["transcribe"]]
        return prompt if has_timestamps else [*prompt, config.no_timestamps_token_id]

    @torch.inference_mode()
    def tokens(self, samples: Samples, language: str, *, has_timestamps: bool) -> list[int]:
        """One pass over the window, as `WhisperForConditionalGeneration.generate` makes several of it."""
        from transformers.generation.logits_process import LogitsProcessorList, WhisperTimeStampLogitsProcessor
        from transformers.generation.utils import GenerationMixin

        config, prompt = self.model.generation_config, self.prompt(language, has_timestamps=has_timestamps)
        rules = [WhisperTimeStampLogitsProcessor(config, len(prompt))] if has_timestamps else []
        ids: Any = GenerationMixin.generate(
            self.model,
            self.features(samples),
            decoder_input_ids=torch.tensor([prompt]),
            logits_processor=LogitsProcessorList(rules),
            do_sample=False,
            max_length=config.max_length,
        )
        return [each for each in ids[0, len(prompt) :].tolist() if each != config.eos_token_id]

    def pieces(self, samples: Samples, language: str) -> list[tuple[Samples, list[int]]]:
        """Parts of a window and their tokens with timestamps: from the last timestamp on a part that the model has not
        written is read again, as OpenAI's Whisper does."""
        begin = self.model.generation_config.no_timestamps_token_id + 1
        ids = self.tokens(samples, language, has_timestamps=True)
        if len(ids) < 2 or min(ids[-2:]) < begin:
            return [(samples, ids)]
        rest = samples[(ids[-1] - begin) * RATE // 50 :]
        return [(samples, ids[:-1]), *(self.pieces(rest, language) if len(rest) >= RATE / 10 else [])]

    @torch.inference_mode()
    def words(self, samples: Samples, language: str, token_ids: Sequence[int]) -> list[TimedWord]:
        """The words of a part's tokens, which are read once more: OpenAI's method, by functions of `transformers`."""
        from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
        from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

        config = self.model.generation_config
        said = [each for each in token_ids if each < config.eos_token_id]
        ids = torch.tensor([[*self.prompt(language, has_timestamps=False), *said]])
        output = self.model(self.features(samples), decoder_input_ids=ids, output_attentions=True)
        read = torch.stack([output.cross_attentions[layer][0, head] for layer, head in config.alignment_heads])
        read = read[..., : len(samples) * read.shape[-1] // WINDOW]
        deviation, mean = torch.std_mean(read, dim=-2, keepdim=True, correction=0)
        matrix = _median_filter((read - mean) / deviation, self.model.config.median_filter_width).mean(dim=0)
        rows, columns = _dynamic_time_warping(-matrix[-len(said) - 1 :].double().numpy())
        times = columns[np.diff(rows, prepend=-1) > 0] * TOKEN_SECONDS
        texts, _, places = _combine_tokens_into_words(self.word_tokenizer, said, language)
        return [
            TimedWord(text.strip(), float(times[place[0]]), float(times[place[-1] + 1]))
            for text, place in zip(texts, places, strict=True)
        ]

    @cached_property
    def word_tokenizer(self) -> Any:
        from transformers import WhisperTokenizer

        return WhisperTokenizer.from_pretrained(self.folder)

    def own_words(self, samples: Samples) -> list[TimedWord]:
        """Of a window, as the pipeline of `transformers` has them: it reads attention while it writes timestamps."""
        from transformers import WhisperFeatureExtractor, pipeline

        extractor = WhisperFeatureExtractor.from_pretrained(self.folder)
        listener: Any = pipeline(
            "automatic-speech-recognition",
            model=self.model,
            tokenizer=self.word_tokenizer,
            feature_extractor=extractor,
        )
        chunks = listener({"raw": samples, "sampling_rate": RATE}, return_timestamps="word")["chunks"]
        return [TimedWord(each["text"].strip(), *each["timestamp"]) for each in chunks]
