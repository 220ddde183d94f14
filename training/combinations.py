"""Questions that combine facts: two hops, comparisons, counts. Each turn has a key of its combination for the split.

The answers first state the facts that they combine ("Paris is the capital of France, and France is in Europe."), in
words and in JSON: a small network combines facts only when it writes them down first.
"""

from random import Random

from training.turns import Fields, Turn, pair_key
from training.world import ANIMALS, COUNTRIES, MONTHS, PLANETS, Country, article, plural

CATEGORY = "combined facts"


def capital_to_continent(rng: Random) -> Turn:
    country = rng.choice(COUNTRIES)
    capital = country.capital
    question = rng.choice((
        f"Which continent is the country whose capital is {capital} in?", f"On which continent is {capital}?",
        f"On which continent is the country with the capital {capital}?", f"Which continent is {capital} in?",
    ))  # fmt: skip
    answer = f"{capital} is the capital of {country.name}, and {country.name} is in {country.continent}."
    fields: Fields = {"country": country.name, "answer": country.continent}
    return Turn(question, answer, fields, f"capital-continent:{capital}", CATEGORY)


def capital_to_language(rng: Random) -> Turn:
    country = rng.choice(COUNTRIES)
    capital = country.capital
    question = rng.choice((
        f"Which language is spoken in {capital}?", f"What language do people speak in {capital}?",
        f"Which language is spoken in the country whose capital is {capital}?",
    ))  # fmt: skip
    answer = f"{capital} is the capital of {country.name}, and people in {country.name} speak {country.language}."
    fields: Fields = {"country": country.name, "answer": country.language}
    return Turn(question, answer, fields, f"capital-language:{capital}", CATEGORY)


def two_countries(rng: Random) -> tuple[Country, Country]:
    left, right = rng.sample(COUNTRIES, 2)
    if rng.random() < 0.4:
        right = rng.choice([other for other in COUNTRIES if other.continent == left.continent and other != left])
    return left, right


def same_continent(rng: Random) -> Turn:
    left, right = two_countries(rng)
    question = rng.choice((
        f"Are {left.name} and {right.name} on the same continent?",
        f"Do {left.name} and {right.name} lie on the same continent?",
        f"Is {left.name} on the same continent as {right.name}?",
    ))  # fmt: skip
    same = left.continent == right.continent
    facts = f"{left.name} is in {left.continent} and {right.name} is in {right.continent}"
    answer = f"{facts}, so {'yes, they are' if same else 'no, they are not'} on the same continent."
    fields: Fields = {"reason": facts, "answer": same}
    return Turn(question, answer, fields, pair_key("same-continent", left.name, right.name), CATEGORY)


def two_capitals(rng: Random) -> Turn:
    left, right = rng.sample(COUNTRIES, 2)
    question = rng.choice((
        f"What are the capitals of {left.name} and {right.name}?",
        f"Name the capitals of {left.name} and {right.name}.",
    ))  # fmt: skip
    answer = f"The capital of {left.name} is {left.capital}, and the capital of {right.name} is {right.capital}."
    fields: Fields = {"answer": [left.capital, right.capital]}
    return Turn(question, answer, fields, pair_key("capitals", left.name, right.name), CATEGORY)


def more_legs(rng: Random) -> Turn:
    left, right = rng.sample(ANIMALS, 2)
    question = rng.choice((
        f"Which has more legs, {article(left.name)} or {article(right.name)}?",
        f"Who has more legs, {article(left.name)} or {article(right.name)}?",
    ))  # fmt: skip
    facts = f"{article(left.name).capitalize()} has {left.legs} legs and {article(right.name)} has {right.legs} legs"
    winner = max((left, right), key=lambda animal: animal.legs)
    same = left.legs == right.legs
    answer = f"{facts}, so " + ("they have the same number." if same else f"the {winner.name} has more legs.")
    fields: Fields = {"reason": facts, "answer": "same" if same else winner.name}
    return Turn(question, answer, fields, pair_key("more-legs", left.name, right.name), CATEGORY)


def legs_together(rng: Random) -> Turn:
    left, right = rng.sample(ANIMALS, 2)
    question = rng.choice((
        f"How many legs do {article(left.name)} and {article(right.name)} have together?",
        f"How many legs do {article(left.name)} and {article(right.name)} have in total?",
    ))  # fmt: skip
    facts = f"{article(left.name).capitalize()} has {left.legs} legs and {article(right.name)} has {right.legs} legs"
    total = left.legs + right.legs
    answer = f"{facts}. {left.legs} + {right.legs} = {total}, so together they have {total} legs."
    fields: Fields = {"working": f"{left.legs} + {right.legs}", "answer": total}
    return Turn(question, answer, fields, pair_key("legs-together", left.name, right.name), CATEGORY)


def legs_of_several(rng: Random) -> Turn:
    animal, count = rng.choice(ANIMALS), rng.randint(2, 9)
    question = rng.choice((
        f"How many legs do {count} {plural(animal.name)} have?",
        f"How many legs do {count} {plural(animal.name)} have together?",
    ))  # fmt: skip
    total = count * animal.legs
    one = article(animal.name).capitalize()
    answer = f"{one} has {animal.legs} legs, and {count} x {animal.legs} = {total}, so they have {total} legs."
    fields: Fields = {"working": f"{count} x {animal.legs}", "answer": total}
    return Turn(question, answer, fields, f"legs:{count}:{animal.name}", CATEGORY)


def same_kind(rng: Random) -> Turn:
    left, right = rng.sample(ANIMALS, 2)
    if left.kind != right.kind and rng.random() < 0.3:
        right = rng.choice([other for other in ANIMALS if other.kind == left.kind and other != left] or [right])
    question = rng.choice((
        f"Are {article(left.name)} and {article(right.name)} the same kind of animal?",
        f"Do {article(left.name)} and {article(right.name)} belong to the same class of animals?",
    ))  # fmt: skip
    same = left.kind == right.kind
    one = article(left.name).capitalize()
    facts = f"{one} is {article(left.kind)} and {article(right.name)} is {article(right.kind)}"
    answer = f"{facts}, so {'yes, they are' if same else 'no, they are not'} of the same kind."
    fields: Fields = {"reason": facts, "answer": same}
    return Turn(question, answer, fields, pair_key("same-kind", left.name, right.name), CATEGORY)


def closer_planet(rng: Random) -> Turn:
    left, right = rng.sample(range(8), 2)
    names = PLANETS[left].name, PLANETS[right].name
    word = rng.choice(("closer to", "farther from"))
    question = f"Which planet is {word} the Sun, {names[0]} or {names[1]}?"
    winner = names[0] if (left < right) == (word == "closer to") else names[1]
    numbers = f"{names[0]} is planet number {left + 1} and {names[1]} is number {right + 1}"
    answer = f"{numbers}, so {winner} is {word} the Sun."
    fields: Fields = {"reason": numbers, "answer": winner}
    return Turn(question, answer, fields, pair_key("closer", *names), CATEGORY)


def longer_month(rng: Random) -> Turn:
    left, right = rng.sample(MONTHS, 2)
    question = f"Which month is longer, {left[0]} or {right[0]}?"
    facts = f"{left[0]} has {left[1]} days and {right[0]} has {right[1]} days"
    same, winner = left[1] == right[1], left[0] if left[1] > right[1] else right[0]
    answer = f"{facts}, so " + ("they are equally long." if same else f"{winner} is longer.")
    fields: Fields = {"reason": facts, "answer": "same" if same else winner}
    return Turn(question, answer, fields, pair_key("longer-month", left[0], right[0]), CATEGORY)


COMBINATIONS = (
    capital_to_continent, capital_to_language, same_continent, two_capitals, more_legs, legs_together, legs_of_several,
    same_kind, closer_planet, longer_month,
)  # fmt: skip
