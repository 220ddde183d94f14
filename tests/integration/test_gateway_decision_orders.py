"""A question for yes or no is asked in both orders of its options, in `/v1/decisions` and `/v1/systemone`."""

from collections.abc import Mapping
from typing import Any

import pytest

from support.decisions import PREDICATE, Probability, decide, deciding, refusal, text_of
from support.gateway import RunningGateway, running_gateway


def by_order(yes_first: Mapping[str, float], no_first: Mapping[str, float]) -> Probability:
    """The probability of each label, by the order of the options in the prompt."""

    def probability(prompt: str, token: str) -> float:
        return (yes_first if "\nA: yes" in prompt else no_first).get(token, 1.0)

    return probability


async def answers_of_both_apis(gateway: RunningGateway) -> list[Any]:
    """The answers to a predicate and to a noul with descriptions, each alone and behind a choice."""
    noul = {"type": "noul", "instructions": "Is it late?", "criteria": {"true": "after ten", "false": "before ten"}}
    choice = {"type": "choice", "instructions": "Which?", "choices": [{"value": "yes"}, {"value": "no"}]}
    answers = []
    for questions in ([PREDICATE], [choice, PREDICATE]):
        answers.append((await decide(gateway, *questions)).answers[-1].to_dict())
    for others in ({}, {"which": {"type": "choice", "criteria": {"yes": None, "no": None}}}):
        body = {"state": "Hello", "questions": {**others, "late": noul}}
        answers.append((await gateway.http.post("/v1/systemone", json=body)).json()["answers"]["late"])
    return answers


async def test_yes_or_no_is_asked_in_both_orders_and_the_answer_is_the_mean() -> None:
    probability = by_order({"A": 0.6, "B": 0.2}, {"A": 0.05, "B": 0.2})
    async with deciding(probability) as engine, running_gateway(engine) as gateway:
        *predicates, first, second = await answers_of_both_apis(gateway)
        mean = pytest.approx((0.6 / 0.8 + 0.2 / 0.25) / 2)
        assert predicates == [{"type": "predicate", "name": None, "probability": mean}] * 2
        assert first == second == {"type": "noul", "noul": mean}
        prompts = [text_of(request) for request in engine.requests if len(request.pooling_params.score_token_ids) == 2]
        ending = "Answer with one label.<end>\n<start>assistant\n"
        options = [prompt.removesuffix(ending).splitlines()[-2:] for prompt in prompts]
        predicate = [["A: yes", "B: no"], ["A: no", "B: yes"]]
        noul = [
            ["A: yes: after ten", "B: no: before ten"],
            ["A: no: before ten", "B: yes: after ten"],
        ]
        choice = [["A: yes", "B: no"]]
        assert options == [*predicate, *choice, *predicate, *noul, *choice, *noul]


async def test_a_model_that_always_prefers_the_first_label_is_undecided() -> None:
    async with deciding(lambda _, token: {"A": 0.9}.get(token, 0.05)) as engine, running_gateway(engine) as gateway:
        answers = await answers_of_both_apis(gateway)
        assert [answer.get("probability", answer.get("noul")) for answer in answers] == [pytest.approx(0.5)] * 4


@pytest.mark.parametrize(("mass", "is_refusal"), [(0.0182, False), (0.0178, True)])
async def test_yes_or_no_is_refused_by_the_mean_of_both_orders(mass: float, is_refusal: bool) -> None:
    """The labels have this probability in one order, and 0.002 in the other: 0.01 is the least mean that answers."""
    orders = [{"A": 0.75 * mass, "B": 0.25 * mass}, {"A": 0.001, "B": 0.001}]
    for probability in (by_order(*orders), by_order(*reversed(orders))):
        async with deciding(probability) as engine, running_gateway(engine) as gateway:
            answers = await answers_of_both_apis(gateway)
            assert [answer["type"] == "refusal" for answer in answers] == [is_refusal] * 4


async def test_the_limit_of_inputs_counts_questions() -> None:
    async with deciding() as engine, running_gateway(engine, max_pooling_inputs=3) as gateway:
        assert len((await decide(gateway, *[PREDICATE] * 3)).answers) == 3
        message = "4 questions are above the limit of 3 in one request."
        assert await refusal(gateway, questions=[PREDICATE] * 4) == (400, "questions", message)


async def test_a_predicate_counts_as_two_sequences() -> None:
    choice = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
    async with deciding() as engine, running_gateway(engine, max_concurrent_requests=3) as gateway:
        assert len((await decide(gateway, PREDICATE, choice)).answers) == 2
        assert (await refusal(gateway, questions=[PREDICATE, PREDICATE]))[0] == 429
