"""LangChain with OpenAI's and Anthropic's APIs."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

from client_checks.openai_chat import Person
from client_checks.tools import CAPITAL, QUESTION, TOOL


def chat(url: str, model: str, **fields: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", model=model, api_key="none", temperature=0, max_retries=0, **fields)


def check_invoke(url: str, model: str) -> None:
    answer = chat(url, model).invoke(CAPITAL)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 1


def check_stream_and_batch(url: str, model: str) -> None:
    assert "Paris" in "".join(chunk.content for chunk in chat(url, model).stream(CAPITAL))
    assert all("Paris" in answer.content for answer in chat(url, model).batch([CAPITAL, CAPITAL]))


def check_bind_tools(url: str, model: str) -> None:
    with_tools = chat(url, model).bind_tools([TOOL])
    first = with_tools.invoke(QUESTION)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    result = ToolMessage('{"weather": "rain"}', tool_call_id=call["id"])
    assert with_tools.invoke([HumanMessage(QUESTION), first, result]).content


def check_structured_output(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        answer = chat(url, model).with_structured_output(Person, method=method).invoke(CAPITAL)
        assert isinstance(answer, Person), method


def check_responses(url: str, model: str) -> None:
    assert "Paris" in chat(url, model, use_responses_api=True).invoke(CAPITAL).text


def check_completion(url: str, model: str) -> None:
    assert OpenAI(base_url=f"{url}/v1", model=model, api_key="none", max_tokens=5, max_retries=0).invoke("One")


def check_anthropic(url: str, model: str) -> None:
    claude = ChatAnthropic(base_url=url, model=model, api_key="none", temperature=0, max_tokens=100, max_retries=0)
    assert "Paris" in claude.invoke(CAPITAL).text
    (call,) = claude.bind_tools([TOOL]).invoke(QUESTION).tool_calls
    assert call["args"] == {"city": "Rome"}
