"""An agent of the OpenAI Agents SDK with a function and web search: `openai_agent.py QUESTION`.

The address is in `OPENAI_BASE_URL`, the model in `OPENAI_DEFAULT_MODEL`. The conversation is kept in the home folder,
and goes on with the next question.
"""

import asyncio
import sys
from pathlib import Path

from agents import Agent, Runner, SQLiteSession, WebSearchTool, function_tool, set_tracing_disabled


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main(question: str) -> None:
    set_tracing_disabled(True)
    tools = [read_file, WebSearchTool()]
    agent = Agent(name="Reader", instructions="You read files for the user.", tools=tools)
    session = SQLiteSession("conversation", Path.home() / "conversation.db")
    print((await Runner.run(agent, question, session=session)).final_output)


asyncio.run(main(*sys.argv[1:]))
