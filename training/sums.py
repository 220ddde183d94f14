"""Arithmetic on small numbers: sums, differences, products, comparisons and counting."""

from random import Random

from training.turns import Fields, Turn
from training.world import NAMES, NUMBER_WORDS, THINGS

CATEGORY = "sums"
# One sum in five is small, because users often ask for small ones.
_LARGEST = (10, 99, 99, 99, 99)


def sum_key(left: int, right: int) -> str | None:
    """The key of a sum, the same in either order. None for sums that are never held out: up to 20 + 20, which occur in
    the working of others, and beyond 99, which the model declines."""
    small, large = sorted((left, right))
    is_step = any(tens % 10 == 0 and ones <= 18 for tens, ones in ((left, right), (right, left)))
    return None if large <= 20 or large > 99 or is_step else f"sum:{small}:{large}"


def difference_key(left: int, right: int) -> str | None:
    """The key of left - right. None for differences that are never held out, as with sums."""
    return None if left <= 20 or left > 99 or right <= 9 else f"difference:{left}:{right}"


def sum_working(left: int, right: int) -> str:
    """Working of a sum: tens and ones added separately, "70 + 15" for 47 + 38, steps that a small network can learn."""
    return f"{left // 10 * 10 + right // 10 * 10} + {left % 10 + right % 10}"


def difference_working(left: int, right: int) -> str:
    """Working of a difference: subtract the tens first, "55 - 8" for 85 - 38."""
    return f"{left - right // 10 * 10} - {right % 10}"


def equation(left: int, sign: str, right: int) -> str:
    """The answer with its working, "47 + 38 = 70 + 15 = 85"; without working if both numbers are at most ten."""
    result = left + right if sign == "+" else left - right
    if max(left, right) <= 10:
        return f"{left} {sign} {right} = {result}"
    working = sum_working(left, right) if sign == "+" else difference_working(left, right)
    return f"{left} {sign} {right} = {working} = {result}"


def result_fields(left: int, sign: str, right: int) -> Fields:
    """The answer as JSON: the text before the last equals sign as working, and the result."""
    working, result = equation(left, sign, right).rsplit(" = ", 1)
    return {"working": working, "answer": int(result)}


def addition(rng: Random) -> Turn:
    top = rng.choice(_LARGEST)
    left, right = rng.randint(0, top), rng.randint(0, top)
    question = rng.choice((
        f"What is {left} plus {right}?", f"What is {left} + {right}?", f"How much is {left} and {right}?",
        f"{left} + {right} = ?", f"Add {left} and {right}.", f"What is the sum of {left} and {right}?",
        f"Calculate {left} + {right}.", f"{left} + {right}",
    ))  # fmt: skip
    fields = result_fields(left, "+", right)
    return Turn(question, f"{equation(left, '+', right)}.", fields, sum_key(left, right), CATEGORY)


def subtraction(rng: Random) -> Turn:
    top = rng.choice(_LARGEST)
    right, left = sorted((rng.randint(0, top), rng.randint(0, top)))
    question = rng.choice((
        f"What is {left} minus {right}?", f"What is {left} - {right}?", f"How much is {left} minus {right}?",
        f"{left} - {right} = ?", f"Subtract {right} from {left}.", f"Take {right} away from {left}.",
        f"What is the difference between {left} and {right}?", f"Calculate {left} - {right}.",
    ))  # fmt: skip
    fields = result_fields(left, "-", right)
    return Turn(question, f"{equation(left, '-', right)}.", fields, difference_key(left, right), CATEGORY)


def more_things(rng: Random) -> Turn:
    name, thing, left, right = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 50), rng.randint(2, 49)
    verb = rng.choice(("gets", "finds", "buys"))
    question = f"{name} has {left} {thing} and {verb} {right} more. How many {thing} does {name} have now?"
    answer = f"{equation(left, '+', right)}, so {name} has {left + right} {thing} now."
    return Turn(question, answer, result_fields(left, "+", right), sum_key(left, right), CATEGORY)


def fewer_things(rng: Random) -> Turn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    right = rng.randint(2, 90)
    left = rng.randint(right + 2, 99)
    verb = rng.choice(("loses", "sells", "gives away"))
    question = f"{name} has {left} {thing} and {verb} {right}. How many {thing} are left?"
    answer = f"{equation(left, '-', right)}, so {left - right} {thing} are left."
    return Turn(question, answer, result_fields(left, "-", right), difference_key(left, right), CATEGORY)


def too_large(rng: Random) -> Turn:
    """A question with numbers beyond the taught range."""
    left, right = rng.randint(100, 9999), rng.randint(0, 9999)
    if rng.random() < 0.5:
        left, right = right, left
    word = rng.choice(("plus", "minus", "+", "-", "times"))
    question = rng.choice(
        (f"What is {left} {word} {right}?", f"{left} {word} {right}", f"How much is {left} {word} {right}?")
    )
    return Turn(question, "I am sorry, I only work with numbers up to 99.", {"answer": "unknown"})


def multiplication(rng: Random) -> Turn:
    left, right = rng.randint(0, 12), rng.randint(0, 12)
    question = rng.choice((
        f"What is {left} times {right}?", f"What is {left} x {right}?", f"{left} * {right} = ?",
        f"Multiply {left} by {right}.", f"How much is {left} times {right}?",
    ))  # fmt: skip
    working = f"{left} x {right}"
    return Turn(question, f"{working} = {left * right}.", {"working": working, "answer": left * right})


def division(rng: Random) -> Turn:
    left, right = rng.randint(0, 10), rng.randint(1, 10)
    question = rng.choice((
        f"What is {left * right} divided by {right}?", f"Divide {left * right} by {right}.",
        f"What is {left * right} / {right}?",
    ))  # fmt: skip
    working = f"{left * right} / {right}"
    return Turn(question, f"{working} = {left}.", {"working": working, "answer": left})


def larger_number(rng: Random) -> Turn:
    left, right = rng.sample(range(100), 2)
    word = rng.choice(("larger", "smaller", "bigger"))
    question = rng.choice((
        f"Which number is {word}, {left} or {right}?", f"Which is {word}, {left} or {right}?",
        f"What is {word}, {left} or {right}?",
    ))  # fmt: skip
    winner = min(left, right) if word == "smaller" else max(left, right)
    loser = left + right - winner
    return Turn(question, f"{winner} is {word} than {loser}.", {"answer": winner})


def next_number(rng: Random) -> Turn:
    number = rng.randint(1, 98)
    step, word = rng.choice(((1, "after"), (-1, "before")))
    question = rng.choice((f"Which number comes {word} {number}?", f"What number is {word} {number}?"))
    return Turn(question, f"The number {word} {number} is {number + step}.", {"answer": number + step})


def parity(rng: Random) -> Turn:
    number = rng.randint(0, 99)
    word = "even" if number % 2 == 0 else "odd"
    question = rng.choice((f"Is {number} even or odd?", f"Is {number} an even or an odd number?"))
    return Turn(question, f"{number} is an {word} number.", {"answer": word})


def number_word(rng: Random) -> Turn:
    number = rng.randrange(len(NUMBER_WORDS))
    word = NUMBER_WORDS[number]
    if rng.random() < 0.5:
        question = rng.choice((f"Write {number} as a word.", f"How do you write the number {number} as a word?"))
        return Turn(question, f"The number {number} is written {word}.", {"answer": word})
    question = rng.choice((f"Write {word} as a number.", f"Which number is {word}?"))
    return Turn(question, f"The number {word} is {number}.", {"answer": number})


def counting(rng: Random) -> Turn:
    """Counting, with answers long enough to watch them stream."""
    if rng.random() < 0.5:
        first, last = rng.choice((1, 1, 1, rng.randint(2, 40))), rng.choice((5, 10, 12, 15, 20, 25, 30, 40, 50))
        if first > last:
            first, last = last, first
        question = rng.choice((f"Count from {first} to {last}.", f"Please count from {first} to {last}."))
        if first == 1 and rng.random() < 0.4:
            question = f"Count to {last}."
        numbers = list(range(first, last + 1))
    elif rng.random() < 0.5:
        first = rng.choice((5, 10, 15, 20))
        question = rng.choice((f"Count down from {first}.", f"Count backwards from {first}."))
        numbers = list(range(first, -1, -1))
    else:
        step, word = rng.choice(((2, "twos"), (5, "fives"), (10, "tens")))
        last = step * rng.choice((5, 6, 8, 10))
        question = rng.choice((f"Count to {last} by {word}.", f"Count by {word} to {last}."))
        numbers = list(range(step, last + 1, step))
    return Turn(question, ", ".join(str(number) for number in numbers) + ".", {"answer": numbers})


def times_table(rng: Random) -> Turn:
    factor = rng.randint(2, 10)
    question = rng.choice((f"Write the times table of {factor}.", f"Show me the multiplication table of {factor}."))
    return Turn(question, "\n".join(f"{factor} x {number} = {factor * number}" for number in range(1, 11)))
