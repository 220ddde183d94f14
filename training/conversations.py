"""Conversations for training: topics mixed by weight, some in JSON, some with follow-ups, typing errors or tools.

All functions are deterministic in the random generator passed to them.
"""

from collections.abc import Sequence
from random import Random

from training import combinations, copying, facts, stories, sums, talk, words
from training.tool_conversations import tool_conversation, unfit_turn
from training.turns import Conversation, Exchange, Topic, Turn, draw
from training.world import COUNTRIES, NAMES

# Weights are shares of the questions. Topics that need working out get more than topics that need recall.
TOPICS: tuple[tuple[Topic, float], ...] = (
    (facts.country_fact, 11), (facts.animal_fact, 9), (facts.planet_fact, 3), (facts.calendar_fact, 3),
    *((topic, 1) for topic in words.WORDS),
    (sums.addition, 11), (sums.subtraction, 11), (sums.more_things, 2.5), (sums.fewer_things, 2.5),
    (sums.multiplication, 3), (sums.division, 1.5), (sums.larger_number, 3), (sums.next_number, 0.7),
    (sums.parity, 0.7), (sums.number_word, 0.7), (sums.counting, 2.5), (sums.times_table, 0.2), (sums.too_large, 0.6),
    *((topic, 2.2) for topic in combinations.COMBINATIONS),
    (combinations.same_continent, 2.5), (combinations.same_kind, 2),
    (talk.about_proa, 3), (talk.small_talk, 3), (talk.unknown_subject, 4), (unfit_turn, 2), (talk.introduction, 0.8),
    (talk.extraction, 3), (copying.into_json, 7), (copying.from_json, 7), (copying.repeat, 2),
    (stories.story, 1.2), (stories.listing, 1.2),
)  # fmt: skip
_TOOL_SHARE, _JSON_SHARE, _COMBINED_JSON_SHARE = 0.35, 0.16, 0.4

_ASK_JSON = (
    "{} Answer in JSON.", "{} Reply in JSON.", "Answer in JSON: {}", "In JSON, please: {}",
    "{} Give the answer as JSON.",
    'Answer with a JSON object with the key "answer". {}',
)  # fmt: skip
_SYSTEM = (
    "You are a helpful assistant.", "You are Proa, a small and friendly assistant.", "Answer briefly.",
    "You are the built-in model of Proa.", "Be polite.",
)  # fmt: skip
_SYSTEM_JSON = ("Always answer in JSON.", "Answer every question with a JSON object.", "You only speak JSON.")


def conversation(rng: Random) -> Conversation:
    if rng.random() < _TOOL_SHARE:
        return tool_conversation(rng, _plain_turn, rng.choice(_SYSTEM) if rng.random() < 0.3 else None)
    json_only = rng.random() < 0.04
    system = rng.choice(_SYSTEM_JSON) if json_only else rng.choice(_SYSTEM) if rng.random() < 0.1 else None
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        turns.extend(_next_turns(rng, turns))
    if json_only:
        turns = [turn for turn in turns if turn.fields is not None] or [draw(sums.addition, rng)]
    elif rng.random() < 0.1:
        turns = with_name(rng, turns)
    exchanges = tuple(_exchange(rng, turn, json_only) for turn in turns)
    return Conversation(system, exchanges, tuple(turn.combination for turn in turns if turn.combination is not None))


def _next_turns(rng: Random, before: Sequence[Turn]) -> list[Turn]:
    if rng.random() < 0.12:
        return country_follow_ups(rng)
    if not before and rng.random() < 0.1:
        return [draw(talk.small_talk, rng)]
    return [_plain_turn(rng)]


def _plain_turn(rng: Random) -> Turn:
    topic = rng.choices([topic for topic, _ in TOPICS], [weight for _, weight in TOPICS])[0]
    return draw(topic, rng)


def country_follow_ups(rng: Random) -> list[Turn]:
    """A question about a country, then short ones that refer to it: "And its continent?", "And of Spain?"."""
    country = rng.choice(COUNTRIES)
    relations = rng.sample(("capital", "continent", "language"), 2)
    turns = [facts.country_turn(rng, country, relations[0])]
    asked = relations[1]
    answer = facts.country_turn(rng, country, asked)
    short = rng.choice((f"And its {asked}?", f"And what is its {asked}?", f"What about its {asked}?"))
    turns.append(Turn(short, answer.answer, answer.fields))
    if rng.random() < 0.6:
        other = rng.choice(COUNTRIES)
        answer = facts.country_turn(rng, other, asked)
        short = rng.choice((f"And of {other.name}?", f"And {other.name}?", f"What about {other.name}?"))
        turns.append(Turn(short, answer.answer, answer.fields))
    return turns


def with_name(rng: Random, turns: Sequence[Turn]) -> list[Turn]:
    """The conversation, with the user's name given before it and asked for after it."""
    introduction, *asked = talk.name_dialogue(rng)
    return [introduction, *turns, *asked]


def _exchange(rng: Random, turn: Turn, json_only: bool) -> Exchange:
    question = turn.question
    if turn.fields is not None and json_only:
        return Exchange(question, turn.json_answer)
    share = _COMBINED_JSON_SHARE if turn.category == combinations.CATEGORY else _JSON_SHARE
    if turn.fields is not None and rng.random() < share:
        return Exchange(rng.choice(_ASK_JSON).format(question), turn.json_answer)
    question = talk.with_opener(rng, question)
    if rng.random() < 0.06:
        question = question.lower().rstrip("?.!") if not _copies(turn) else question.rstrip("?.!")
    return Exchange(question, turn.answer)


def _copies(turn: Turn) -> bool:
    """Whether the answer copies words of the question, whose capital letters must not change."""
    return (
        turn.category == copying.CATEGORY
        or any(name in turn.answer for name in NAMES)
        or "called" in turn.answer
        or "meet you" in turn.answer
    )
