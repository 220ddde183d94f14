"""Tables of the facts that the built-in model is taught."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Country:
    name: str
    capital: str
    continent: str
    language: str


@dataclass(frozen=True, slots=True)
class Animal:
    name: str
    kind: str
    legs: int
    home: str
    food: str
    young: str


@dataclass(frozen=True, slots=True)
class Planet:
    """`remark` completes a sentence that starts with the name."""

    name: str
    remark: str


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> dict[str, str]:
    """The words to the left and to the right of each colon."""
    return dict((left, right) for left, right in (pair.split(":") for pair in words(text)))


def _countries() -> tuple[Country, ...]:
    table = """
        France Paris Europe French|Germany Berlin Europe German|Spain Madrid Europe Spanish|Italy Rome Europe Italian
        Portugal Lisbon Europe Portuguese|Poland Warsaw Europe Polish|Greece Athens Europe Greek
        Sweden Stockholm Europe Swedish|Norway Oslo Europe Norwegian|Finland Helsinki Europe Finnish
        Denmark Copenhagen Europe Danish|Austria Vienna Europe German|Hungary Budapest Europe Hungarian
        Ireland Dublin Europe English|Iceland Reykjavik Europe Icelandic|England London Europe English
        Japan Tokyo Asia Japanese|China Beijing Asia Chinese|Thailand Bangkok Asia Thai|Vietnam Hanoi Asia Vietnamese
        Nepal Kathmandu Asia Nepali|Iran Tehran Asia Persian|Iraq Baghdad Asia Arabic
        Mongolia Ulaanbaatar Asia Mongolian|Jordan Amman Asia Arabic|Egypt Cairo Africa Arabic
        Morocco Rabat Africa Arabic|Tunisia Tunis Africa Arabic
        Ghana Accra Africa English|Angola Luanda Africa Portuguese|Senegal Dakar Africa French
        Zambia Lusaka Africa English|Mali Bamako Africa French|Peru Lima South_America Spanish
        Chile Santiago South_America Spanish|Brazil Brasilia South_America Portuguese
        Argentina Buenos_Aires South_America Spanish|Colombia Bogota South_America Spanish
        Ecuador Quito South_America Spanish|Uruguay Montevideo South_America Spanish
        Cuba Havana North_America Spanish|Jamaica Kingston North_America English
        Mexico Mexico_City North_America Spanish|Panama Panama_City North_America Spanish
        Haiti Port-au-Prince North_America French
        Fiji Suva Oceania English|Samoa Apia Oceania Samoan|Tonga Nukualofa Oceania Tongan
    """
    rows = [row.split() for line in table.strip().splitlines() for row in line.split("|")]
    return tuple(Country(*(cell.replace("_", " ") for cell in row)) for row in rows)


def _animals() -> tuple[Animal, ...]:
    table = """
        dog mammal 4 house meat puppy|cat mammal 4 house fish kitten|cow mammal 4 farm grass calf
        horse mammal 4 farm hay foal|sheep mammal 4 farm grass lamb|pig mammal 4 farm corn piglet
        goat mammal 4 farm leaves kid|lion mammal 4 savanna meat cub|elephant mammal 4 savanna leaves calf
        zebra mammal 4 savanna grass foal|bear mammal 4 forest berries cub|fox mammal 4 forest mice kit
        deer mammal 4 forest leaves fawn|wolf mammal 4 forest meat pup|rabbit mammal 4 meadow carrots kit
        camel mammal 4 desert grass calf|kangaroo mammal 2 desert grass joey|whale mammal 0 sea krill calf
        dolphin mammal 0 sea fish calf|bat mammal 2 cave insects pup|duck bird 2 pond seeds duckling
        chicken bird 2 farm corn chick|eagle bird 2 mountains fish eaglet|owl bird 2 forest mice owlet
        penguin bird 2 ice fish chick|swan bird 2 lake plants cygnet|shark fish 0 sea fish pup
        frog amphibian 4 pond insects tadpole|snake reptile 0 desert mice snakelet
        turtle reptile 4 sea plants hatchling|crocodile reptile 4 river meat hatchling
        bee insect 6 hive nectar larva|ant insect 6 anthill seeds larva|butterfly insect 6 meadow nectar caterpillar
        beetle insect 6 forest leaves grub|spider arachnid 8 web insects spiderling
        scorpion arachnid 8 desert insects scorpling|crab crustacean 10 beach plants larva
    """
    rows = [row.split() for line in table.strip().splitlines() for row in line.split("|")]
    return tuple(Animal(name, kind, int(legs), home, food, young) for name, kind, legs, home, food, young in rows)


COUNTRIES = _countries()
CONTINENTS = ("Africa", "Asia", "Europe", "North America", "Oceania", "South America")
ANIMALS = _animals()

PLANETS = (
    Planet("Mercury", "is the smallest planet and the closest to the Sun"),
    Planet("Venus", "is the hottest planet"),
    Planet("Earth", "is the planet on which we live"),
    Planet("Mars", "is known as the red planet"),
    Planet("Jupiter", "is the largest planet"),
    Planet("Saturn", "is famous for its rings"),
    Planet("Uranus", "is a cold planet that is tipped on its side"),
    Planet("Neptune", "is the planet farthest from the Sun"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    ("January", 31), ("February", 28), ("March", 31), ("April", 30), ("May", 31), ("June", 30),
    ("July", 31), ("August", 31), ("September", 30), ("October", 31), ("November", 30), ("December", 31),
)  # fmt: skip
SEASONS = ("spring", "summer", "autumn", "winter")
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth",
    "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

COLOURS = _pairs(
    "grass:green snow:white coal:black blood:red lemon:yellow banana:yellow carrot:orange tomato:red "
    "chocolate:brown milk:white sky:blue plum:purple pumpkin:orange strawberry:red cucumber:green raven:black"
)
MIXTURES = {
    ("blue", "yellow"): "green",
    ("red", "yellow"): "orange",
    ("blue", "red"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}
OPPOSITES = _pairs(
    "hot:cold big:small up:down left:right day:night fast:slow open:closed happy:sad rich:poor young:old early:late "
    "high:low hard:soft full:empty wet:dry light:dark good:bad strong:weak long:short clean:dirty loud:quiet "
    "thick:thin wide:narrow near:far first:last true:false begin:end buy:sell give:take win:lose inside:outside "
    "above:below"
)
PLURALS = _pairs(
    "cat:cats dog:dogs house:houses tree:trees car:cars book:books box:boxes bus:buses fox:foxes "
    "city:cities baby:babies story:stories child:children man:men woman:women foot:feet tooth:teeth goose:geese "
    "mouse:mice sheep:sheep fish:fish leaf:leaves knife:knives wolf:wolves person:people apple:apples"
)
UNITS = (
    ("seconds", "minute", 60), ("minutes", "hour", 60), ("hours", "day", 24), ("days", "week", 7),
    ("months", "year", 12), ("days", "year", 365), ("weeks", "year", 52), ("years", "century", 100),
    ("years", "decade", 10), ("centimetres", "metre", 100), ("metres", "kilometre", 1000),
    ("grams", "kilogram", 1000), ("millimetres", "centimetre", 10), ("eggs", "dozen", 12),
)  # fmt: skip
SHAPES = {"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "octagon": 8}

NAMES = words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karen Leo Maria Nora Oscar Paul Rosa Sam Tina Victor "
    "Alice Bob Carla Daniel Eva Frank Gina Hugo Iris Julia Kevin Lucy Max Nina Oliver Peter Ruth Simon Tom Wendy"
)
THINGS = (
    "apples", "books", "coins", "stones", "stamps", "pencils", "marbles", "eggs", "flowers", "cards", "balls",
    "shells",
)  # fmt: skip


def article(noun: str) -> str:
    """The noun with its indefinite article: "an owl", "a dog"."""
    return f"{'an' if noun[0] in 'aeiou' or noun == 'hour' else 'a'} {noun}"


def plural(animal: str) -> str:
    """The plural of an animal's name."""
    irregular = {"sheep": "sheep", "deer": "deer", "wolf": "wolves", "butterfly": "butterflies", "fox": "foxes"}
    return irregular.get(animal, f"{animal}s")
