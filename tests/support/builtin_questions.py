"""Questions to the built-in model that it was not trained on, as prompts."""

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.tokenizer import ChatOptions, Tokenizer
from support.engine import request
from training.evaluate import held_out_questions, tool_questions


def greedy_questions() -> list[EngineCoreRequest]:
    """Twenty greedy requests, half of them with tools."""
    tokenizer = Tokenizer(read_tokenizer_files(builtin_model_folder()))
    asked = [*held_out_questions(10, seed=3), *tool_questions(10, seed=3)]
    prompts = [
        tokenizer.apply_chat_template(each.messages, ChatOptions(tools=[tool.definition for tool in each.tools]))
        for each in asked
    ]
    params = SamplingParams(temperature=0.0, max_tokens=100)
    return [request(str(index), token_ids, params) for index, token_ids in enumerate(prompts)]
