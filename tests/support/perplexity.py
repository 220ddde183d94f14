"""Perplexity of a model over documents, through Proa itself; and documents that the built-in model never saw."""

import math
from collections.abc import Sequence
from random import Random

from proa_engine import LLM, SamplingParams
from proa_engine.builtin import builtin_model_folder
from training.evaluate import held_out_questions
from training.tokens import ASSISTANT, BEGIN, END, USER, Document, documents, load_tokenizer

SEED = 20_261_121  # of no training run


def unseen_documents(conversations: int, questions: int) -> list[Document]:
    """Conversations of a new seed, and questions whose combinations training never held, with their answers."""
    tokenizer = load_tokenizer(builtin_model_folder() / "tokenizer.json")
    endless = documents(tokenizer, Random(SEED))
    result = [next(endless) for _ in range(conversations)]
    for question in held_out_questions(questions, SEED):
        asked = tokenizer.encode(f"{BEGIN}{USER}{question.text}{END}{ASSISTANT}", add_special_tokens=False).ids
        answer = tokenizer.encode(f"{question.expected}{END}", add_special_tokens=False).ids
        result.append((asked + answer, [False] * len(asked) + [True] * len(answer)))
    return result


def perplexity(llm: LLM, documents: Sequence[Document]) -> float:
    """Over the tokens that a document marks: e to the mean of their negative log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in documents], params, use_tqdm=False)
    total, count = 0.0, 0
    for (ids, marked), output in zip(documents, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, is_marked, logprobs in zip(ids, marked, output.prompt_logprobs, strict=True):
            if is_marked and logprobs is not None:
                total -= logprobs[token].logprob
                count += 1
    return math.exp(total / count)
