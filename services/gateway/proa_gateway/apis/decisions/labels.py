"""Labels of a question's options, and the probabilities of the options from those of the labels' tokens.

Letters, if a question has at most 26 options and each letter is one token; else numbers of one length, so that no label
is the beginning of another. A label of several tokens has the product of their probabilities, each after those before.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Final

from tokenizers import Tokenizer

MIN_LABEL_MASS: Final = 0.01  # of the whole vocabulary, below which the model has not answered
_MIN_SHARE: Final = 1e-4  # of the labels that begin with some tokens; those of less are not told apart
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a question's options, and the tokens of each."""

    texts: Sequence[str]  # letters, or numbers if there are many options
    tokens: Sequence[Tokens]

    @property
    def longest(self) -> int:
        """Tokens of the longest label."""
        return max(map(len, self.tokens))


def choose_labels(tokenizer: Tokenizer, tail: str, num_options: int) -> Labels | None:
    """`tail`: the prompt's text after its last added token. None: the tokenizer cannot tell the labels apart."""
    letters = list(ascii_uppercase[:num_options])
    if len(letters) == num_options:
        tokens = tokens_after(tokenizer, tail, letters)
        if all(len(each) == 1 for each in tokens) and len(set(tokens)) == num_options:
            return Labels(letters, tokens)
    width = len(str(num_options))
    numbers = [str(number).zfill(width) for number in range(1, num_options + 1)]
    tokens = tokens_after(tokenizer, tail, numbers)
    beginnings = {each[:size] for each in tokens for size in range(1, len(each))}
    return Labels(numbers, tokens) if len(set(tokens) - beginnings) == num_options else None


def tokens_after(tokenizer: Tokenizer, tail: str, labels: Sequence[str]) -> list[Tokens]:
    """The tokens of each label behind `tail`. Where the tokenizer would join the two, which the model cannot any more,
    those of the label alone."""
    before, *joined = tokenizer.encode_batch_fast([tail, *(tail + label for label in labels)], add_special_tokens=False)
    alone = tokenizer.encode_batch_fast(list(labels), add_special_tokens=False)
    size = len(before.ids)
    return [
        tuple(both.ids[size:] if both.ids[:size] == before.ids and len(both.ids) > size else label.ids)
        for both, label in zip(joined, alone, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The probability of each option among the options, and the labels' share of the whole vocabulary."""

    probabilities: Sequence[float]
    label_mass: float  # from 0 to 1

    @property
    def is_refusal(self) -> bool:
        """Whether the model would rather write something else than a label."""
        return self.label_mass < MIN_LABEL_MASS

    @property
    def best(self) -> int:
        """The most probable option, of equal ones the first."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the best option's label in the whole vocabulary."""
        return self.probabilities[self.best] * self.label_mass

    @property
    def mean(self) -> float:
        """The mean of the options' indexes, weighted by their probabilities."""
        return math.fsum(index * probability for index, probability in enumerate(self.probabilities))

    def evened(self, other: "Distribution") -> "Distribution":
        """The mean of this one and `other`, which has the same options in the reverse order."""
        pairs = zip(self.probabilities, reversed(other.probabilities), strict=True)
        probabilities = [(ours + theirs) / 2 for ours, theirs in pairs]
        return Distribution(probabilities, (self.label_mass + other.label_mass) / 2)


@dataclass(slots=True)
class LabelReading:
    """The reading of one question's labels: the tokens at one place of all labels at a time."""

    tokens: Sequence[Tokens]  # of each label
    _known: dict[Tokens, float] = field(default_factory=lambda: {(): 1.0})  # beginning of labels -> probability

    def next_tokens(self) -> Mapping[Tokens, Tokens]:
        """The beginnings of labels after which probabilities are to be read, and the tokens of which. Empty: all that
        matters is known."""
        mass = math.fsum(self._weights())
        if mass < MIN_LABEL_MASS:
            return {}
        wanted: dict[Tokens, set[int]] = {}
        for label in self.tokens:
            known = self._known_beginning(label)
            if len(known) < len(label) and self._known[known] > _MIN_SHARE * mass:
                wanted.setdefault(known, set()).add(label[len(known)])
        return {beginning: tuple(sorted(tokens)) for beginning, tokens in wanted.items()}

    def add(self, beginning: Tokens, tokens: Tokens, logprobs: Sequence[float]) -> None:
        """`logprobs`: of each of the `tokens` behind the prompt and `beginning`."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._known[*beginning, token] = self._known[beginning] * math.exp(logprob)

    def distribution(self) -> Distribution:
        weights = self._weights()
        total = math.fsum(weights)
        if not total:
            return Distribution([1 / len(weights)] * len(weights), 0.0)
        return Distribution([weight / total for weight in weights], min(1.0, total))

    def _weights(self) -> list[float]:
        """The probability of each label. Those of which the same beginning is known have equal shares of it."""
        known = [self._known_beginning(label) for label in self.tokens]
        counts = Counter(known)
        return [self._known[each] / counts[each] for each in known]

    def _known_beginning(self, label: Tokens) -> Tokens:
        return next(label[:size] for size in range(len(label), -1, -1) if label[:size] in self._known)
