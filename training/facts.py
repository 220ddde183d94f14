"""Questions about single facts: countries, animals, planets, the calendar."""

from random import Random

from training.turns import Turn
from training.world import (
    ANIMALS,
    COUNTRIES,
    DAYS,
    MONTHS,
    ORDINALS,
    PLANETS,
    SEASONS,
    Country,
    article,
    plural,
)


def country_fact(rng: Random) -> Turn:
    return country_turn(rng, rng.choice(COUNTRIES), rng.choice(("capital", "continent", "language", "country")))


def country_turn(rng: Random, country: Country, relation: str) -> Turn:
    """A question about one property of a country; "country" asks for the country of a capital."""
    name = country.name
    if relation == "capital":
        question = rng.choice((
            f"What is the capital of {name}?", f"Which city is the capital of {name}?", f"Name the capital of {name}.",
            f"What is the capital city of {name}?", f"{name}: what is its capital?",
        ))  # fmt: skip
        return Turn(question, f"The capital of {name} is {country.capital}.", {"answer": country.capital})
    if relation == "continent":
        question = rng.choice((
            f"On which continent is {name}?", f"Which continent is {name} in?", f"What continent is {name} on?",
            f"Where is {name}?", f"In which part of the world is {name}?",
        ))  # fmt: skip
        return Turn(question, f"{name} is in {country.continent}.", {"answer": country.continent})
    if relation == "language":
        question = rng.choice((
            f"Which language is spoken in {name}?", f"What language do people speak in {name}?",
            f"What is the language of {name}?", f"What do they speak in {name}?",
        ))  # fmt: skip
        return Turn(question, f"People in {name} speak {country.language}.", {"answer": country.language})
    question = rng.choice((
        f"{country.capital} is the capital of which country?", f"Which country has {country.capital} as its capital?",
        f"What country is {country.capital} the capital of?", f"In which country is {country.capital}?",
    ))  # fmt: skip
    return Turn(question, f"{country.capital} is the capital of {name}.", {"answer": name})


def animal_fact(rng: Random) -> Turn:
    animal = rng.choice(ANIMALS)
    one, many = article(animal.name), plural(animal.name)
    relation = rng.choice(("legs", "home", "food", "young", "kind"))
    if relation == "legs":
        question = rng.choice((
            f"How many legs does {one} have?", f"How many legs has {one}?", f"What is the number of legs of {one}?",
        ))  # fmt: skip
        legs = f"{animal.legs} legs" if animal.legs else "no legs"
        return Turn(question, f"{one.capitalize()} has {legs}.", {"answer": animal.legs})
    if relation == "home":
        question = rng.choice((f"Where does {one} live?", f"Where do {many} live?", f"What is the home of {one}?"))
        place = ("on the " if animal.home in ("farm", "savanna", "ice") else "in the ") + animal.home
        return Turn(question, f"{one.capitalize()} lives {place}.", {"answer": animal.home})
    if relation == "food":
        question = rng.choice((f"What does {one} eat?", f"What do {many} eat?", f"What is the food of {one}?"))
        return Turn(question, f"{one.capitalize()} eats {animal.food}.", {"answer": animal.food})
    if relation == "young":
        question = rng.choice((
            f"What is a young {animal.name} called?", f"What do you call a baby {animal.name}?",
            f"What is the name for the young of {one}?",
        ))  # fmt: skip
        return Turn(question, f"A young {animal.name} is called {article(animal.young)}.", {"answer": animal.young})
    question = rng.choice((
        f"What kind of animal is {one}?", f"Which class of animals does {one} belong to?",
        f"What sort of animal is {one}?",
    ))  # fmt: skip
    return Turn(question, f"{one.capitalize()} is {article(animal.kind)}.", {"answer": animal.kind})


def planet_fact(rng: Random) -> Turn:
    number = rng.randrange(len(PLANETS))
    planet, ordinal = PLANETS[number], ORDINALS[number]
    if rng.random() < 0.4:
        question = rng.choice((
            f"What do you know about {planet.name}?", f"Tell me something about {planet.name}.",
            f"What is {planet.name}?", f"Describe the planet {planet.name}.",
        ))  # fmt: skip
        answer = f"{planet.name} {planet.remark}. It is planet number {number + 1} from the Sun."
        return Turn(question, answer, {"planet": planet.name, "answer": number + 1})
    if rng.random() < 0.5:
        question = rng.choice((
            f"Which planet is the {ordinal} from the Sun?", f"What is the {ordinal} planet from the Sun?",
            f"Name the {ordinal} planet.",
        ))  # fmt: skip
        return Turn(question, f"The {ordinal} planet from the Sun is {planet.name}.", {"answer": planet.name})
    if rng.random() < 0.5:
        extremes = {
            "the smallest": 0, "closest to the Sun": 0, "the hottest": 1, "the largest": 4, "the biggest": 4,
            "farthest from the Sun": 7, "called the red planet": 3,
        }  # fmt: skip
        words, index = rng.choice(list(extremes.items()))
        question = f"Which planet is {words}?"
        return Turn(question, f"{PLANETS[index].name} {PLANETS[index].remark}.", {"answer": PLANETS[index].name})
    question = rng.choice((f"Is {planet.name} a planet?", f"Does {planet.name} go around the Sun?"))
    return Turn(question, f"Yes, {planet.name} is the {ordinal} planet from the Sun.", {"answer": True})


def calendar_fact(rng: Random) -> Turn:
    series = rng.choice(("day", "month", "length", "season", "number"))
    if series in ("day", "month", "season"):
        names = {"day": DAYS, "month": tuple(name for name, _ in MONTHS), "season": SEASONS}[series]
        here = rng.randrange(len(names))
        step, word = rng.choice(((1, "after"), (-1, "before")))
        there = names[(here + step) % len(names)]
        question = rng.choice((
            f"Which {series} comes {word} {names[here]}?", f"What {series} is {word} {names[here]}?",
            f"What is the {series} {word} {names[here]}?",
        ))  # fmt: skip
        start = f"The {series} {word} {names[here]}"
        return Turn(question, f"{start} is {there}.", {"answer": there})
    index = rng.randrange(12)
    month, days = MONTHS[index]
    if series == "length":
        question = rng.choice((f"How many days does {month} have?", f"How many days are there in {month}?"))
        tail = ", and 29 in a leap year" if month == "February" else ""
        return Turn(question, f"{month} has {days} days{tail}.", {"answer": days})
    ordinal = ORDINALS[index]
    question = rng.choice((f"What is the {ordinal} month of the year?", f"Which month is number {index + 1}?"))
    return Turn(question, f"The {ordinal} month of the year is {month}.", {"answer": month})
