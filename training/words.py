"""Questions about words and things: opposites, plurals, colours, units, shapes."""

from random import Random

from training.turns import Topic, Turn
from training.world import COLOURS, MIXTURES, OPPOSITES, PLURALS, SHAPES, UNITS, article


def opposite(rng: Random) -> Turn:
    pair = rng.choice(list(OPPOSITES.items()))
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    question = rng.choice((
        f"What is the opposite of {word}?", f"Tell me the opposite of {word}.",
        f"Which word means the opposite of {word}?",
    ))  # fmt: skip
    return Turn(question, f"The opposite of {word} is {other}.", {"answer": other})


def plural_form(rng: Random) -> Turn:
    word, other = rng.choice(list(PLURALS.items()))
    question = rng.choice((f"What is the plural of {word}?", f"Tell me the plural of {word}."))
    return Turn(question, f"The plural of {word} is {other}.", {"answer": other})


def colour(rng: Random) -> Turn:
    thing, its_colour = rng.choice(list(COLOURS.items()))
    question = rng.choice((f"What colour is {thing}?", f"What color is {thing}?", f"Which colour has {thing}?"))
    return Turn(question, f"The colour of {thing} is {its_colour}.", {"answer": its_colour})


def mixture(rng: Random) -> Turn:
    (first, second), mixed = rng.choice(list(MIXTURES.items()))
    if rng.random() < 0.5:
        first, second = second, first
    question = rng.choice((
        f"Which colour do {first} and {second} make?", f"What do you get when you mix {first} and {second}?",
    ))  # fmt: skip
    return Turn(question, f"If you mix {first} and {second}, you get {mixed}.", {"answer": mixed})


def unit(rng: Random) -> Turn:
    small, large, count = rng.choice(UNITS)
    one = article(large)
    question = rng.choice((f"How many {small} are in {one}?", f"How many {small} has {one}?"))
    return Turn(question, f"There are {count} {small} in {one}.", {"answer": count})


def shape(rng: Random) -> Turn:
    name, sides = rng.choice(list(SHAPES.items()))
    part = rng.choice(("sides", "corners"))
    return Turn(f"How many {part} does {article(name)} have?", f"{article(name).capitalize()} has {sides} {part}.",
                {"answer": sides})  # fmt: skip


WORDS: tuple[Topic, ...] = (opposite, plural_form, colour, mixture, unit, shape)
