"""Answers from the probabilities of a question's options, and the two responses that have them."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proa_gateway.apis.decisions.labels import Distribution
from proa_gateway.apis.decisions.protocol import ChoiceQuestion, DecisionQuestion, PredicateQuestion
from proa_gateway.apis.decisions.system_one import CriteriaChoice, NoulQuestion, SystemOneQuestion
from proa_gateway.http.streaming import Content
from proa_gateway.serving.choices import Usage


def render_decision(
    questions: Sequence[DecisionQuestion], read: Sequence[Distribution], model: str, usage: Usage
) -> Content:
    answers = [_answer(question, each) for question, each in zip(questions, read, strict=True)]
    tokens = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens,
    }
    return Content(orjson.dumps({"answers": answers, "model": model, "usage": tokens}))


def _answer(question: DecisionQuestion, read: Distribution) -> dict[str, Any]:
    if read.is_refusal:
        return {"type": "refusal", "name": question.name}
    head, probabilities = {"type": question.type, "name": question.name}, read.probabilities
    if isinstance(question, PredicateQuestion):
        return {**head, "probability": probabilities[0]}
    if isinstance(question, ChoiceQuestion):
        values = [choice.value for choice in question.choices]
        return {
            **head,
            "choice": values[read.best],
            "confidence": read.confidence,
            "probabilities": [
                {"value": value, "probability": probability}
                for value, probability in zip(values, probabilities, strict=True)
            ],
        }
    return {
        **head,
        "score": read.mean,
        "confidence": read.confidence,
        "probabilities": [
            {"value": index, "label": level.label, "probability": probability}
            for index, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
    }


def render_system_one(
    questions: Mapping[str, SystemOneQuestion], read: Sequence[Distribution], model: str, usage: Usage
) -> Content:
    answers = {id: _criteria_answer(questions[id], each) for id, each in zip(questions, read, strict=True)}
    tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
    return Content(orjson.dumps({"model": model, "answers": answers, "usage": tokens}))


def _criteria_answer(question: SystemOneQuestion, read: Distribution) -> dict[str, Any]:
    if read.is_refusal:
        return {"type": "refusal"}
    probabilities = read.probabilities
    if isinstance(question, NoulQuestion):
        return {"type": "noul", "noul": probabilities[0]}
    if isinstance(question, CriteriaChoice):
        names = list(question.criteria)
        return {
            "type": "choice",
            "choice": names[read.best],
            "confidence": read.confidence,
            "probabilities": dict(zip(names, probabilities, strict=True)),
        }
    numbers = [str(index) for index in range(len(question.criteria))]
    return {
        "type": "score",
        "score": read.mean,
        "confidence": read.confidence,
        "legend": dict(zip(numbers, question.criteria, strict=True)),
        "probabilities": dict(zip(numbers, probabilities, strict=True)),
    }
