"""Real Whisper models against `transformers`: `PYTHONPATH=tests python tests/peers/speech.py`.

An engine and a gateway serve each model that `scripts/real-model --speech` writes, and OpenAI's client sends the
recordings beside them. Compared with `transformers` in float32, for the same windows: greedy tokens of text, tokens
with timestamps, words and their times, the language; and the word error rates of both against the recordings whose
text is known. Then one hour of speech, made of these recordings with pauses between them, shows how many words are lost
where windows are cut.
Prints a line for each, and exits with 1 if something differs.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from openai import OpenAI
from peers.speech_reference import RATE, WINDOW, Reference, TimedWord

from proa_gateway.audio.decode import Samples, decode, decode_windows
from support.audio_files import encode
from support.processes import engine_process, gateway_process

FOLDER = Path("build/real-speech")
SECONDS = 3600.0  # far more than an answer takes
TEXTS = {
    "beckett": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
    "two_cities": """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
        foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the
        season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had
        nothing before us, we were all going direct to Heaven, we were all going direct the other way - in short, the
        period was so far like the present period, that some of its noisiest authorities insisted on its being received,
        for good or for evil, in the superlative degree of comparison only.""",
}
"""What is said in the recordings whose text is known."""
MILLISECOND = 0.0011  # to which times are rounded
PAUSES = (0.3, 2.0)  # seconds between the recordings of the long audio


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare Proa with transformers on real Whisper models.")
    parser.add_argument("--only", default="", help="only the model whose name contains this text")
    parser.add_argument("--minutes", type=float, default=60, help="length of the long audio; 0: none")
    parser.add_argument("--long-model", default="tiny.en", help="the model that reads the long audio")
    arguments = parser.parse_args()
    names = [each for each in ("tiny.en", "base") if arguments.only in each]
    num_wrong = 0
    for name in names:
        with served(FOLDER / name) as client:
            num_wrong += compare(Reference(FOLDER / name), client)
            if name == arguments.long_model and arguments.minutes:
                read_long(client, arguments.minutes)
    print(f"{num_wrong} differ" if num_wrong else "nothing differs")
    return 1 if num_wrong else 0


@contextmanager
def served(folder: Path) -> Iterator[OpenAI]:
    size = ("--max-num-seqs=8", "--num-gpu-blocks-override=2000")
    with (
        engine_process(f"--model={folder}", "--served-model-name=whisper", *size, seconds=SECONDS) as (_, address),
        gateway_process(address, f"--audio-decode-timeout={SECONDS}") as (_, port),  # however busy the machine is
        OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client,
    ):
        yield client


def compare(reference: Reference, client: OpenAI) -> int:
    """Return how many recordings differ."""
    num_wrong, totals, word_times = 0, dict.fromkeys(("tokens", "timed tokens", "languages"), 0), WordTimes()
    theirs, ours, known = list[str](), list[str](), list[str]()
    for path in sorted((FOLDER / "recordings").glob("*.wav")):
        data = path.read_bytes()
        windows = windows_of(data)
        language = reference.language(windows[0])
        tokens = [each for window in windows for each in reference.tokens(window, language, has_timestamps=False)]
        timed = [reference.pieces(window, language) for window in windows]
        text, text_bytes = transcribe(client, data)
        verbose = client.audio.transcriptions.create(
            model="whisper",
            file=data,
            response_format="verbose_json",
            timestamp_granularities=["segment", "word"],
            temperature=0,
        )
        timed_ids = [token_id for pieces in timed for _, ids in pieces for token_id in ids]
        have_words = word_times.add(verbose.words or (), *timed_words(reference, windows, timed, language))
        differing = [
            what
            for what, is_equal in (
                ("tokens", text_bytes == [token_bytes(reference, each) for each in tokens]),
                ("timed tokens", joined(verbose.segments or ()) == timed_ids),
                ("words", have_words),
                ("languages", verbose.language == {"en": "english"}.get(language, language)),
            )
            if not is_equal
        ]
        for what in differing:
            print(f"WRONG {reference.folder.name} {path.stem}: {what} differ", flush=True)
        num_wrong += bool(differing)
        totals["tokens"] += len(tokens)
        totals["timed tokens"] += len(timed_ids)
        totals["languages"] += 1
        if path.stem in TEXTS:
            theirs += words(reference.tokenizer.decode(tokens))
            ours += words(text)
            known += words(TEXTS[path.stem])
    figures = ", ".join(f"{count} {what}" for what, count in totals.items())
    rates = f"{error_rate(known, ours):.2%}, of transformers {error_rate(known, theirs):.2%}"
    print(f"{reference.folder.name}: {figures} compared, {num_wrong} recordings differ; word error rate {rates}")
    print(f"  {word_times}", flush=True)
    return num_wrong + (error_rate(known, ours) > error_rate(known, theirs))


@dataclass
class WordTimes:
    """How words are timed, compared with `transformers`."""

    num_words: int = 0
    own: list[float] = field(default_factory=list)  # how far starts are from those of its pipeline, in seconds

    def add(self, found: Sequence[Any], expected: Sequence[TimedWord], own: Sequence[TimedWord]) -> bool:
        """`own`: the pipeline's words. Return whether texts and times are the expected ones."""
        self.num_words += len(found)
        texts = [each.word for each in found]
        for block in SequenceMatcher(None, texts, [each.text for each in own], autojunk=False).get_matching_blocks():
            pairs = zip(found[block.a :][: block.size], own[block.b :], strict=False)
            self.own += [abs(each.start - other.start) for each, other in pairs]
        times = np.array([(each.start, each.end) for each in found])
        others = np.array([(each.start, each.end) for each in expected])
        return texts == [each.text for each in expected] and bool((abs(times - others) < MILLISECOND).all())

    def __str__(self) -> str:
        near = ", ".join(f"{sum(each < most for each in self.own)} within {most} s" for most in (0.03, 0.1, 0.25))
        return f"{self.num_words} words; of {len(self.own)} that transformers' pipeline has too: {near}"


def timed_words(
    reference: Reference,
    windows: Sequence[Samples],
    timed: Sequence[Sequence[tuple[Samples, list[int]]]],
    language: str,
) -> tuple[list[TimedWord], list[TimedWord]]:
    """The words of a recording by `Reference.words`, of these parts of its windows, and by `Reference.own_words`."""
    expected, own, start = list[TimedWord](), list[TimedWord](), 0
    for window, pieces in zip(windows, timed, strict=True):
        own += [each.later(start / RATE) for each in reference.own_words(window)]
        for samples, ids in pieces:
            begin = (start + len(window) - len(samples)) / RATE
            expected += [each.later(begin) for each in reference.words(samples, language, ids)]
        start += len(window)
    return expected, own


def windows_of(data: bytes) -> list[Samples]:
    """As the gateway decodes a file."""
    most = round(2 * SECONDS * RATE)
    return [each for each, _ in decode_windows(data, sampling_rate=RATE, max_window=WINDOW, max_samples=most)]


def transcribe(client: OpenAI, data: bytes) -> tuple[str, list[bytes]]:
    """The text, and the bytes of its tokens, of a stream: it has one attempt."""
    events = client.audio.transcriptions.create(
        model="whisper", file=data, stream=True, temperature=0, include=["logprobs"]
    )
    *_, done = events
    assert done.type == "transcript.text.done"
    return done.text, [bytes(each.bytes or ()) for each in done.logprobs or ()]


def token_bytes(reference: Reference, token_id: int) -> bytes:
    from proa.text import Vocabulary

    return Vocabulary(reference.tokenizer).token_bytes(token_id)


def joined(segments: Sequence[Any]) -> list[int]:
    """The tokens of all segments."""
    return [token_id for each in segments for token_id in each.tokens]


def read_long(client: OpenAI, minutes: float) -> None:
    """Print how far it is read, then the wrong words: in recordings that are cut, and in others."""
    parts, samples = long_audio(round(60 * minutes * RATE))
    data = encode(samples, RATE, "ogg opus", options={"strict": "-2", "b": "32000"})
    cuts = np.cumsum([len(each) for each in windows_of(data)])[:-1]
    started, num_words, text = time.monotonic(), 0, ""
    for event in client.audio.transcriptions.create(model="whisper", file=data, stream=True):
        if event.type == "transcript.text.delta":
            text += event.delta
            if (count := len(words(text)) // 500) > num_words:
                num_words = count
                print(f"  {500 * count} words after {time.monotonic() - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    known = [words(TEXTS[part.name]) for part in parts]
    wrong = iter(errors([each for part in known for each in part], words(text)))
    by_part = [sum(next(wrong) for _ in part) for part in known]
    is_cut = [bool(((cuts > part.start) & (cuts < part.end)).any()) for part in parts]
    for what, chosen in (("with a cut in them", True), ("without", False)):
        of = [index for index, each in enumerate(is_cut) if each == chosen]
        count, total = sum(by_part[index] for index in of), sum(len(known[index]) for index in of)
        print(f"  {len(of)} recordings {what}: {count} of {total} words wrong")
    print(f"  {len(samples) / RATE / 60:.0f} minutes in {len(cuts) + 1} windows, read in {seconds:.0f} s", flush=True)


@dataclass(frozen=True)
class Part:
    """A recording in the long audio: its samples from `start` to `end`."""

    name: str
    start: int
    end: int


def long_audio(num_samples: int) -> tuple[list[Part], Samples]:
    """At least so many samples: the recordings whose text is known in any order, with pauses of any length."""
    random, parts, pieces, position = Random(0), list[Part](), list[Samples](), 0
    recordings = {
        name: np.concatenate(list(decode((FOLDER / f"recordings/{name}.wav").read_bytes(), RATE))) for name in TEXTS
    }
    while position < num_samples:
        name, pause = random.choice(list(recordings)), round(random.uniform(*PAUSES) * RATE)
        pieces += recordings[name], np.zeros(pause, np.float32)
        parts.append(Part(name, position, position + len(recordings[name])))
        position += len(recordings[name]) + pause
    return parts, np.concatenate(pieces)


def words(text: str) -> list[str]:
    return re.sub(r"[^\w\s']", " ", text.lower()).split()


def errors(known: Sequence[str], found: Sequence[str], band: int = 300) -> list[int]:
    """For each known word, how many words are wrong there by the edit distance: it is missing or another one, or has
    others before it. Words that correspond are less than `band` places apart."""
    infinite = len(known) + len(found)
    rows = [{0: 0}]  # by the number of found words: of as many known words as the row's number
    for row in range(len(known) + 1):
        costs = rows[row] if row == 0 else {}
        for column in range(max(0, row - band), min(len(found), row + band) + 1):
            if row or column:
                above = rows[row - 1] if row else {}
                missing, other = above.get(column, infinite) + 1, above.get(column - 1, infinite)
                other += row > 0 < column and known[row - 1] != found[column - 1]
                costs[column] = min(missing, other, costs.get(column - 1, infinite) + 1)
        if row:
            rows.append(costs)
    row, column, counts = len(known), len(found), [0] * len(known)
    while row:
        above, cost = rows[row - 1], rows[row][column]
        is_same = column > 0 and known[row - 1] == found[column - 1]
        if column and above.get(column - 1, infinite) + (not is_same) == cost:
            counts[row - 1] += not is_same
            row, column = row - 1, column - 1
        elif above.get(column, infinite) + 1 == cost:
            counts[row - 1] += 1
            row -= 1
        else:
            counts[row - 1] += 1
            column -= 1
    counts[0] += column
    return counts


def error_rate(known: Sequence[str], found: Sequence[str]) -> float:
    return sum(errors(known, found)) / len(known)


if __name__ == "__main__":
    sys.exit(main())
