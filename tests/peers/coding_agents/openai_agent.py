"""An agent of the OpenAI Agents SDK with a function and web search: `openai_agent.py MODEL QUESTION`.

The address is in `OPENAI_BASE_URL`.
"""

import asyncio
import sys
from pathlib import Path

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main(model: str, question: str) -> None:
    set_tracing_disabled(True)
    agent = Agent(
        name="Reader",
        instructions="You read files for the user.",
        model=OpenAIResponsesModel(model, AsyncOpenAI()),
        model_settings=ModelSettings(max_tokens=32 if model != "fake" else 1024),
        tools=[read_file, WebSearchTool()],
    )
    print((await Runner.run(agent, question)).final_output)


asyncio.run(main(*sys.argv[1:]))
