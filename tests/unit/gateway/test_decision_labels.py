"""Labels of options in tokenizers of several kinds, and probabilities of options from those of their labels' tokens."""

import math
from collections.abc import Mapping, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from proa_gateway.apis.decisions.labels import Distribution, LabelReading, Tokens, choose_labels
from support.tokenizers import byte_level_tokenizer, metaspace_tokenizer


def texts_of(tokenizer: Tokenizer, labels: Sequence[Tokens]) -> list[str]:
    return [tokenizer.decode(list(each), skip_special_tokens=False) for each in labels]


def number_tokenizer() -> Tokenizer:
    """Numbers of three digits are one token, as in Llama 3; so are digits, and no letter is known."""
    vocab = {str(number): number for number in range(10)}
    vocab |= {str(number).zfill(3): 10 + number for number in range(1000)}
    vocab["?"] = 2000
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize("tail", ["", "assistant\n", "assistant: "])
@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), metaspace_tokenizer(strip=False)])
def test_up_to_26_options_have_letters(tokenizer: Tokenizer, tail: str) -> None:
    labels = choose_labels(tokenizer, tail, 26)
    assert labels is not None
    assert "".join(labels.texts) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert (labels.longest, len(set(labels.tokens))) == (1, 26)
    assert [text.strip() for text in texts_of(tokenizer, labels.tokens)] == list(labels.texts)


def test_more_options_have_numbers_of_one_length() -> None:
    tokenizer = byte_level_tokenizer()
    labels = choose_labels(tokenizer, "assistant\n", 120)
    assert labels is not None
    assert (labels.texts[0], labels.texts[8], labels.texts[119]) == ("001", "009", "120")
    assert texts_of(tokenizer, labels.tokens) == list(labels.texts)
    assert labels.longest == 3


def test_a_number_may_be_one_token() -> None:
    labels = choose_labels(number_tokenizer(), "", 100)
    assert labels is not None
    assert labels.longest == 1


def test_letters_that_are_not_in_the_vocabulary_are_no_labels() -> None:
    tokenizer = number_tokenizer()
    labels = choose_labels(tokenizer, "", 9)
    assert labels is not None
    assert list(labels.texts) == [str(number) for number in range(1, 10)]
    assert choose_labels(tokenizer, "", 12) is None  # nor are numbers of two digits


def read(tokens: Sequence[Tokens], model: Mapping[Tokens, Mapping[int, float]]) -> tuple[LabelReading, list[Tokens]]:
    """Read all labels from a model: beginning -> token -> probability. Returns what was read too, in order."""
    reading, asked = LabelReading(tokens), []
    while wanted := reading.next_tokens():
        for beginning, next_tokens in wanted.items():
            asked.append(beginning)
            reading.add(beginning, next_tokens, [math.log(model[beginning][token]) for token in next_tokens])
    return reading, asked


def test_probabilities_are_shares_of_the_labels_and_their_mass_is_that_of_the_vocabulary() -> None:
    reading, asked = read([(1,), (2,), (3,)], {(): {1: 0.1, 2: 0.3, 3: 0.1}})
    found = reading.distribution()
    assert asked == [()]
    assert found.probabilities == pytest.approx([0.2, 0.6, 0.2])
    assert found.label_mass == pytest.approx(0.5)
    assert (found.best, found.is_refusal) == (1, False)
    assert found.confidence == pytest.approx(0.3)
    assert found.mean == pytest.approx(1.0)


def test_labels_of_several_tokens_have_the_products_of_their_probabilities() -> None:
    tokens = [(0, 1), (0, 2), (1, 0), (1, 1)]
    model = {(): {0: 0.5, 1: 0.25}, (0,): {1: 0.5, 2: 0.25}, (1,): {0: 0.75, 1: 0.25}}
    reading, asked = read(tokens, model)
    weights = [0.25, 0.125, 0.1875, 0.0625]
    assert asked == [(), (0,), (1,)]
    assert reading.distribution().label_mass == pytest.approx(sum(weights))
    assert reading.distribution().probabilities == pytest.approx([each / sum(weights) for each in weights])


def test_a_first_digit_that_is_hardly_possible_is_not_followed() -> None:
    tokens = [(0, 1), (0, 2), (1, 0), (1, 1)]
    reading, asked = read(tokens, {(): {0: 0.9, 1: 0.00009}, (0,): {1: 0.5, 2: 0.5}})
    assert asked == [(), (0,)]
    found = reading.distribution()
    assert found.probabilities[2] == found.probabilities[3] == pytest.approx(0.00005, rel=0.01)
    assert sum(found.probabilities) == pytest.approx(1)


def test_the_mean_of_both_orders_is_that_of_each_option_and_of_the_labels_mass() -> None:
    found = Distribution([0.75, 0.25], 0.8).evened(Distribution([0.1, 0.9], 0.4))
    assert found.probabilities == pytest.approx([0.825, 0.175])
    assert found.label_mass == pytest.approx(0.6)


@pytest.mark.parametrize(("mass", "is_refusal"), [(0.0101, False), (0.0099, True), (0.0, True)])
def test_a_model_that_writes_no_label_refuses(mass: float, is_refusal: bool) -> None:
    reading = LabelReading([(1,), (2,)])
    reading.add((), (1, 2), [math.log(mass / 2) if mass else -math.inf] * 2)
    found = reading.distribution()
    assert found.is_refusal is is_refusal
    assert found.label_mass == pytest.approx(mass)
    assert reading.next_tokens() == {}


def test_a_refusal_is_not_read_further() -> None:
    reading = LabelReading([(0, 1), (0, 2), (1, 0)])
    reading.add((), (0, 1), [math.log(0.004)] * 2)
    assert reading.next_tokens() == {}
    assert reading.distribution().is_refusal
