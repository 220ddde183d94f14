"""Tokens a step of JSON and of tool calls with drafts, with and without a grammar. On a CPU, with the built-in model.

    PYTHONPATH=tests python -m benchmarks.engine.grammar_drafts

Each request is alone and greedy, with four draft tokens in every step. Steps are those behind the prompt's, with the
one that is in flight when the output ends. A request's tokens are the same with every method, which is checked.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.engine.grammars import json_grammar
from proa.contract import Grammar
from proa_engine import LLM, SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.tokenizer import ChatOptions, Tokenizer
from training.evaluate import Question, held_out_questions, tool_questions

NUM_DRAFTS = 4
METHODS: dict[str, dict[str, Any] | None] = {
    "no drafts": None,
    "ngram": {"method": "ngram"},
    "eagle3": {"method": "eagle3", "model": "builtin"},
}
ALWAYS = {"num_speculative_tokens": NUM_DRAFTS, "num_speculative_tokens_per_batch_size": [[1, 1, NUM_DRAFTS]]}


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
    """Prompts and grammars of `count` requests of a kind."""

    def __init__(self, count: int) -> None:
        self._tokenizer = Tokenizer(read_tokenizer_files(builtin_model_folder()))
        (self._call,) = self._tokenizer.encode("<tool_call>")
        asked = [each for each in held_out_questions(20 * count, seed=3) if each.wants_json][:count]
        self.json = [self._make(each, self._json_grammar(each)) for each in asked]
        tools = [each for each in tool_questions(4 * count, seed=3) if "tool_call" in each.expected][:count]
        self.calls = [self._make(each, self._call_grammar(each)) for each in tools]

    def _json_grammar(self, question: Question) -> Grammar:
        return Grammar(text=json_grammar(schema_of(json.loads(question.expected))))

    def _call_grammar(self, question: Question) -> Grammar:
        schema = call_schema([tool.definition for tool in question.tools])
        return Grammar(text=json_grammar(schema), start_after=(self._call,))

    def _make(self, question: Question, grammar: Grammar) -> tuple[list[int], Grammar]:
        options = ChatOptions(tools=[tool.definition for tool in question.tools])
        return self._tokenizer.apply_chat_template(question.messages, options), grammar


def measure(llm: LLM, requests: Sequence[tuple[list[int], Grammar]], *, constrained: bool) -> tuple[float, list[Any]]:
    """Return the tokens a step and the outputs."""
    core = llm.llm_engine._core
    num_tokens = num_steps = 0
    outputs = []
    for prompt, grammar in requests:
        params = SamplingParams(max_tokens=100, temperature=0.0, grammar=grammar if constrained else None)
        before = core._num_steps
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        outputs.append(list(output.outputs[0].token_ids))
        num_tokens += len(outputs[-1]) - 1
        num_steps += core._num_steps - before - 1
    return num_tokens / num_steps, outputs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20, help="of each kind")
    options = parser.parse_args(argv)
    requests = Requests(options.requests)
    expected = dict[tuple[str, bool], list[Any]]()
    for name, method in METHODS.items():
        speculative = None if method is None else method | ALWAYS
        llm = LLM("builtin", dtype="float32", max_num_seqs=1, max_model_len=1024, speculative_config=speculative)
        factory = llm.llm_engine._core._scheduler._factory
        for forced in (False, True):
            factory._config = replace(factory._config, compute_forced_tokens=forced)
            for kind, of_kind in (("JSON", requests.json), ("tool calls", requests.calls)):
                for constrained in (False, True):
                    tokens_per_step, outputs = measure(llm, of_kind, constrained=constrained)
                    assert outputs == expected.setdefault((kind, constrained), outputs), "the tokens differ"
                    title = f"{name}, {'' if forced else 'no '}forced tokens, {kind}, "
                    title += f"{'with' if constrained else 'without'} grammar"
                    print(f"{title}: {tokens_per_step:.2f} tokens a step", flush=True)
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
