"""Questions with a yes or no, half of them true: what a model says of facts, and how a label's place sways it."""

from itertools import permutations

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Greece": "Athens",
    "Poland": "Warsaw",
}
KINDS = {
    "animal": ("dog", "horse", "eagle", "salmon"),
    "fruit": ("apple", "banana", "cherry", "grape"),
    "vehicle": ("car", "bus", "train", "bicycle"),
    "colour": ("red", "blue", "green", "yellow"),
}
NUMBERS = (3, 17, 40, 58, 91)


def facts() -> list[tuple[str, bool]]:
    """The questions, and whether yes is right."""
    countries, cities = list(CAPITALS), list(CAPITALS.values())
    capitals = [
        (f"Is {city} the capital of {country}?", city == CAPITALS[country])
        for country, other in zip(countries, cities[3:] + cities[:3], strict=True)
        for city in (CAPITALS[country], other)
    ]
    names = list(KINDS)
    words = [
        (f"Is '{word}' the name of a {kind}?", kind == source)
        for kind, other in zip(names, names[1:] + names[:1], strict=True)
        for source in (kind, other)
        for word in KINDS[source]
    ]
    numbers = [(f"Is {first} greater than {second}?", first > second) for first, second in permutations(NUMBERS, 2)]
    return capitals + words + numbers
