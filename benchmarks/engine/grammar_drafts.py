"""Tokens a step with drafts: of JSON and tool calls, with and without a grammar; of a real model's text and code.

    PYTHONPATH=tests python -m benchmarks.engine.grammar_drafts
    PYTHONPATH=tests python -m benchmarks.engine.grammar_drafts --model build/real-model --drafter DRAFTER --together

On a CPU. Each request is alone, with as many draft tokens in every step. Steps are those behind the prompt's, with the
one that is in flight when the output ends. A request's tokens are the same with every method, which is checked. With
`--together` the requests of a kind run at once, for large models, and only steps of a request with drafts count.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.engine.grammars import json_grammar
from proa.contract import Grammar
from proa_engine import LLM, SamplingParams
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.sources.resolve import resolve_model
from proa_engine.tokenizer import ChatOptions, Tokenizer
from support import real_texts
from training.evaluate import Question, held_out_questions, tool_questions

Request = tuple[list[int], Grammar | None]  # a prompt, and what constrains its output if that is wanted


def methods(drafter: str, num_drafts: int) -> dict[str, dict[str, Any] | None]:
    always = {"num_speculative_tokens": num_drafts, "num_speculative_tokens_per_batch_size": [[1, 1, num_drafts]]}
    return {
        "no drafts": None,
        "ngram": {"method": "ngram", **always},
        "eagle3": {"method": "eagle3", "model": drafter, **always},
    }


def schema_of(value: object) -> dict[str, Any]:
    """A schema of values like this one."""
    match value:
        case dict():
            properties = {key: schema_of(each) for key, each in value.items()}
            return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
        case list():
            return {"type": "array", "items": schema_of(value[0]) if value else {}}
        case str():
            return {"type": "string"}
        case bool():
            return {"type": "boolean"}
        case _:
            return {"type": "number"}


def call_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A schema of calls of these tools, as the model writes them behind `<tool_call>`."""
    functions = [tool["function"] for tool in tools]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    return {"anyOf": calls}


class Requests:
    """Requests by kind. `count`: of each kind that is drawn."""

    def __init__(self, model: str, count: int) -> None:
        self._tokenizer = Tokenizer(read_tokenizer_files(resolve_model(model, None, "auto")))
        asked = [each for each in held_out_questions(20 * count, seed=3) if each.wants_json][:count]
        self.by_kind = {"JSON": [self._make(each, self._json_grammar(each)) for each in asked]}
        if model == "builtin":
            tools = [each for each in tool_questions(4 * count, seed=3) if "tool_call" in each.expected][:count]
            self.by_kind["tool calls"] = [self._make(each, self._call_grammar(each)) for each in tools]
        else:  # a template without tools
            chats = [self._tokenizer.apply_chat_template(real_texts.chat(text)) for text in real_texts.QUESTIONS]
            self.by_kind["text"] = [(chat, None) for chat in chats]
            self.by_kind["code"] = [(self._tokenizer.encode(text), None) for text in real_texts.CODE]

    def _json_grammar(self, question: Question) -> Grammar:
        return Grammar(text=json_grammar(schema_of(json.loads(question.expected))))

    def _call_grammar(self, question: Question) -> Grammar:
        schema = call_schema([tool.definition for tool in question.tools])
        return Grammar(text=json_grammar(schema), start_after=tuple(self._tokenizer.encode("<tool_call>")))

    def _make(self, question: Question, grammar: Grammar) -> Request:
        options = ChatOptions(tools=[tool.definition for tool in question.tools])
        return self._tokenizer.apply_chat_template(question.messages, options), grammar


def measure(
    llm: LLM, requests: Sequence[Request], params: SamplingParams, *, constrained: bool
) -> tuple[float, list[list[int]]]:
    """Return the tokens a step and the outputs."""
    core = llm.llm_engine._core
    num_tokens = num_steps = 0
    outputs = []
    for seed, (prompt, grammar) in enumerate(requests):
        own = replace(params, seed=seed, grammar=grammar if constrained else None)
        before = core._num_steps
        (output,) = llm.generate([{"prompt_token_ids": prompt}], own, use_tqdm=False)
        outputs.append(list(output.outputs[0].token_ids))
        num_tokens += len(outputs[-1]) - 1
        num_steps += core._num_steps - before - 1
    return num_tokens / num_steps, outputs


def measure_together(llm: LLM, requests: Sequence[Request], params: SamplingParams, *, constrained: bool) -> float:
    """Return the tokens of a request in a step in which it had drafts."""
    core = llm.llm_engine._core
    own = [
        replace(params, seed=seed, grammar=grammar if constrained else None)
        for seed, (_, grammar) in enumerate(requests)
    ]
    before = core.counters()
    llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], own, use_tqdm=False)
    after = core.counters()
    num_accepted = after.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens
    return 1 + num_accepted / max(after.drafts.num_drafts - before.drafts.num_drafts, 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="model directory, or builtin")
    parser.add_argument("--drafter", default="builtin", help="directory of an EAGLE-3 drafter, or builtin")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens in every step")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--together", action="store_true", help="run the requests of a kind at once")
    parser.add_argument("--max-tokens", type=int, default=100, help="of an output")
    parser.add_argument("--requests", type=int, default=20, help="of each kind that is drawn")
    options = parser.parse_args(argv)
    requests = Requests(options.model, options.requests)
    expected = dict[tuple[str, bool, float], list[list[int]]]()
    max_num_seqs = 32 if options.together else 1
    for name, speculative in methods(options.drafter, options.drafts).items():
        if options.together and not speculative:
            continue  # one token a step
        settings: dict[str, Any] = {"speculative_config": speculative, "max_num_seqs": max_num_seqs}
        llm = LLM(options.model, dtype="float32", max_model_len=1024, **settings)
        factory = llm.llm_engine._core._scheduler._factory
        for (kind, of_kind), temperature in product(requests.by_kind.items(), options.temperature):
            params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens)
            variants = {"without grammar": (False, False)}
            if all(grammar for _, grammar in of_kind):
                variants |= {"with grammar, all sampled": (True, False), "with grammar": (True, True)}
            for title, (constrained, forced) in variants.items():
                factory._config = replace(factory._config, compute_forced_tokens=forced)
                if options.together:
                    tokens_per_step = measure_together(llm, of_kind, params, constrained=constrained)
                else:
                    tokens_per_step, outputs = measure(llm, of_kind, params, constrained=constrained)
                    key = kind, constrained, temperature
                    assert outputs == expected.setdefault(key, outputs), "the tokens differ"
                figure = f"{tokens_per_step:.2f} tokens a step at temperature {temperature}"
                print(f"{name}, {kind}, {title}: {figure}", flush=True)
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
