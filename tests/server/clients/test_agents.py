"""Agent packages: `pydantic-ai-slim`, `openai-agents` and `instructor`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


QUESTION = "What is the capital of France?"


def pydantic_model(kind: str, server: Any, model: str) -> Any:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    return (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)(model, provider=provider)


@pytest.mark.feature("pydantic-ai-slim", "chat and responses models")
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai_agent_runs_and_streams(kind: str, server: Any, model: str) -> None:
    made = pydantic_model(kind, server, model)
    from pydantic_ai import Agent

    agent = Agent(made, model_settings={"temperature": 0, "max_tokens": 20})
    assert "Paris" in agent.run_sync(QUESTION).output
    assert "Paris" in agent.run_stream_sync(QUESTION).get_output()


@pytest.mark.feature("pydantic-ai-slim", "structured output")
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai_output_fits_its_type(kind: str, server: Any, model: str) -> None:
    made = pydantic_model(kind, server, model)
    from pydantic_ai import Agent, NativeOutput

    for output_type in (City, NativeOutput(City)):
        agent = Agent(made, output_type=output_type, model_settings={"temperature": 0, "max_tokens": 60})
        assert isinstance(agent.run_sync("Describe Paris.").output, City)


@pytest.fixture
def agents(server: Any) -> Any:
    made = pytest.importorskip("agents")
    import openai

    made.set_default_openai_client(
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none"), use_for_tracing=False
    )
    return made


@pytest.mark.feature("openai-agents", "responses and chat, streamed")
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_openai_agents_run_and_stream(agents: Any, model: str, api: str) -> None:
    agents.set_default_openai_api(api)
    settings = agents.ModelSettings(temperature=0, max_tokens=20)
    agent = agents.Agent(name="Guide", instructions="Be brief.", model=model, model_settings=settings)
    result = await agents.Runner.run(agent, QUESTION)
    assert "Paris" in result.final_output
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds
    assert streamed.final_output == result.final_output


@pytest.mark.feature("openai-agents", "tools")
async def test_openai_agents_call_their_tool(agents: Any, model: str) -> None:
    called = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        called.append(city)
        return "Sunny"

    agents.set_default_openai_api("responses")
    settings = agents.ModelSettings(temperature=0, max_tokens=60, tool_choice="required")
    agent = agents.Agent(
        name="Guide",
        instructions="Be brief.",
        model=model,
        model_settings=settings,
        tools=[weather],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await agents.Runner.run(agent, "What is the weather in Rome?")
    assert called
    assert result.final_output == "Sunny"


@pytest.mark.feature("openai-agents", "structured output")
async def test_openai_agents_output_fits_its_type(agents: Any, model: str) -> None:
    agents.set_default_openai_api("responses")
    settings = agents.ModelSettings(temperature=0, max_tokens=60)
    agent = agents.Agent(name="Guide", instructions="Describe.", model=model, model_settings=settings, output_type=City)
    assert isinstance((await agents.Runner.run(agent, "Paris")).final_output, City)


@pytest.mark.feature("instructor", "tools, JSON and JSON schema modes")
@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_answers_with_the_model(client: Any, model: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    wrapped = instructor.from_openai(client, mode=instructor.Mode[mode])
    answer = wrapped.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": 'Describe Paris, such as {"name": "Rome", "is_capital": true}.'}],
        response_model=City,
        temperature=0,
        max_tokens=60,
        max_retries=2,
    )
    assert isinstance(answer, City)
