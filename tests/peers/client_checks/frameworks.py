"""LiteLLM, Instructor and OpenAI's agents."""

import asyncio
import json

import instructor
import litellm
from agents import Agent, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

from client_checks.openai_chat import Person, client
from client_checks.tools import CAPITAL, QUESTION, TOOL


def check_litellm(url: str, model: str) -> None:
    fields = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "temperature": 0}
    answer = litellm.completion(messages=[{"role": "user", "content": CAPITAL}], **fields)
    assert "Paris" in answer.choices[0].message.content
    chunks = litellm.completion(messages=[{"role": "user", "content": CAPITAL}], stream=True, **fields)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def check_litellm_tools(url: str, model: str) -> None:
    answer = litellm.completion(
        model=f"openai/{model}",
        api_base=f"{url}/v1",
        temperature=0,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[TOOL],
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}


def check_litellm_anthropic(url: str, model: str) -> None:
    answer = litellm.completion(
        model=f"anthropic/{model}",
        api_base=url,
        temperature=0,
        max_tokens=50,
        messages=[{"role": "user", "content": CAPITAL}],
    )
    assert "Paris" in answer.choices[0].message.content


def check_instructor(url: str, model: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client(url), mode=mode)
        person = patched.chat.completions.create(
            model=model, response_model=Person, messages=[{"role": "user", "content": "A person."}], max_retries=0
        )
        assert isinstance(person, Person), mode


def check_agents(url: str, model: str) -> None:
    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city"""
        cities.append(city)
        return '{"weather": "rain"}'

    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = Agent(name="a", model=OpenAIResponsesModel(model, openai), tools=[get_weather])
    result = asyncio.run(Runner.run(agent, QUESTION, max_turns=3))
    assert cities == ["Rome"]
    assert result.final_output
