"""Short stories and lists: answers long enough to watch them stream."""

from random import Random

from training.turns import Turn
from training.world import ANIMALS, CONTINENTS, COUNTRIES, DAYS, MONTHS, NAMES, PLANETS, SEASONS, article

_OPENINGS = (
    "Once upon a time there was a {trait} {hero} called {name}, who lived near the {place}.",
    "In a small house by the {place} there lived a {trait} {hero}. Its name was {name}.",
    "Long ago, {one_hero} called {name} lived by the {place}. Everyone said that it was very {trait}.",
)
_EVENTS = (
    "One morning {name} found {one_thing} under an old tree.",
    "One day {name} heard a strange noise and saw {one_thing} in the grass.",
    "One evening the wind was strong, and it carried {one_thing} to the door of {name}.",
)
_MEETINGS = (
    'Then {one_friend} came along and said: "That {thing} is mine. I have looked for it all day."',
    'Just then {one_friend} sat down and began to cry. "I have lost my {thing}," it said.',
    'Soon {one_friend} came by and asked: "Have you seen my {thing}? I cannot sleep without it."',
)
_TURNS = (
    "{name} wanted to keep the {thing}, but it saw how sad the {friend} was, and gave it back.",
    "{name} thought for a long time. At last it smiled and gave the {thing} to the {friend}.",
    '"Here it is," said {name}, and the {friend} was so happy that it danced in the rain.',
)
_ENDINGS = (
    "From that day on the {hero} and the {friend} were good friends, and they played together every day.",
    "The {friend} thanked {name} and shared its supper. The two friends watched the stars until they fell asleep.",
    "That night they walked home together, and the {hero} was never lonely again.",
)
_TRAITS = ("little", "brave", "kind", "clever", "quiet", "curious")
_PLACES = ("river", "forest", "sea", "mountain", "old mill", "lake")
_TREASURES = ("golden key", "red ball", "silver bell", "blue hat", "small box", "warm blanket")


def story_text(rng: Random, hero: str) -> str:
    friend = rng.choice([animal.name for animal in ANIMALS if animal.name != hero])
    thing = rng.choice(_TREASURES)
    words = {
        "hero": hero, "one_hero": article(hero), "friend": friend, "one_friend": article(friend), "thing": thing,
        "one_thing": article(thing), "name": rng.choice(NAMES), "trait": rng.choice(_TRAITS),
        "place": rng.choice(_PLACES),
    }  # fmt: skip
    parts = (_OPENINGS, _EVENTS, _MEETINGS, _TURNS, _ENDINGS)
    return " ".join(rng.choice(sentences).format(**words) for sentences in parts)


def story(rng: Random) -> Turn:
    hero = rng.choice(ANIMALS).name
    asked = rng.choice((
        f"Tell me a story about {article(hero)}.", f"Can you tell me a story about {article(hero)}?",
        f"Write a short story about {article(hero)}.", f"Tell me a tale of {article(hero)}.", "Tell me a story.",
        "Please tell me a short story.",
    ))  # fmt: skip
    return Turn(asked, story_text(rng, hero))


def listing(rng: Random) -> Turn:
    """A question for a complete list, or for a few examples of a longer one, in a fixed order."""
    lists: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("days of the week", "The days of the week are", DAYS),
        ("months of the year", "The months of the year are", tuple(name for name, _ in MONTHS)),
        ("planets", "The planets, from the Sun outwards, are", tuple(planet.name for planet in PLANETS)),
        ("continents", "The continents I know are", CONTINENTS),
        ("seasons", "The seasons are", SEASONS),
    )
    what, head, names = rng.choice((*lists, country_list(rng), animal_list(rng)))
    question = rng.choice((f"Name the {what}.", f"List the {what}.", f"What are the {what}?", f"Tell me the {what}."))
    return Turn(question, f"{head} {', '.join(names[:-1])} and {names[-1]}.", {"answer": list(names)})


def country_list(rng: Random) -> tuple[str, str, tuple[str, ...]]:
    continent = rng.choice(CONTINENTS)
    names = tuple(country.name for country in COUNTRIES if country.continent == continent)[:5]
    return f"countries in {continent}", f"Some countries in {continent} are", names


def animal_list(rng: Random) -> tuple[str, str, tuple[str, ...]]:
    kind = rng.choice(("mammal", "bird", "insect", "reptile"))
    names = tuple(article(animal.name) for animal in ANIMALS if animal.kind == kind)[:4]
    return f"{kind}s that you know", f"Some {kind}s are", names
