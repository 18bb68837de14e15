"""Route ``POST /v1/chat/completions``, and running a chat for the other APIs."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Text, Tokenize, ToolCallDelta
from minisgl_server.api.openai.choices import Choices, make_tokenize
from minisgl_server.api.openai.event_stream import ChoiceEvents, EventStreamResponse
from minisgl_server.api.openai.logprobs import chat_logprobs, prompt_fields
from minisgl_server.api.openai.requests import (
    json_response,
    new_request_id,
    parse_request,
    request_limits,
    run_in_thread_if_large,
    served_model,
)
from minisgl_server.api.openai.sampling import request_sampling
from minisgl_server.api.openai.schemas import ChatRequest, TranslatedChat
from minisgl_server.api.openai.tools import tool_use
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.response_models import ChatCompletionResponse
from minisgl_server.api.unsupported_fields import UNSUPPORTED_REASONS

router = APIRouter()


def chat_prompt(request: Request, chat: ChatRequest) -> Tokenize:
    """Return the message to a tokenizer worker for a chat, without id."""
    if chat.chat_template is not None and not request.app.state.options.trust_request_chat_template:
        raise InvalidValueError("chat_template", chat.chat_template, "left out", UNSUPPORTED_REASONS["chat_template"])
    if chat.continue_final_message and chat.add_generation_prompt:
        allowed = "false or left out if continue_final_message is true"
        raise InvalidValueError("add_generation_prompt", True, allowed)
    if chat.include_reasoning is False and chat.separate_reasoning is False:
        allowed = "true or left out if separate_reasoning is false, which leaves reasoning content in the text"
        raise InvalidValueError("include_reasoning", False, allowed)
    hints = chat.template_hints if isinstance(chat, TranslatedChat) else effort_hints(chat.reasoning_effort)
    prompt = make_tokenize(
        chat,
        request_sampling(chat, served_model(request.app)[0]),
        messages=[message.model_dump(exclude_none=True) for message in chat.messages],
        chat_template_kwargs=chat.chat_template_kwargs or {},
        tools=tool_use(chat),
        add_generation_prompt=chat.add_generation_prompt is not False and not chat.continue_final_message,
        continue_final_message=bool(chat.continue_final_message),
        chat_template=chat.chat_template,
        documents=chat.documents,
        template_hints=hints,
        hints_name="" if chat.reasoning_effort is None else "reasoning_effort",
        include_reasoning=chat.include_reasoning is not False,
        separate_reasoning=chat.separate_reasoning is not False,
    )
    request_limits(request.app).check_conversation(prompt)
    return prompt


def effort_hints(effort: str | None) -> dict[str, Any]:
    """Return the chat template variables of a reasoning effort; see `Tokenize.template_hints`."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


async def start_chat(request: Request, chat: ChatRequest, prefix: str) -> Choices:
    """Start a chat whose ids have a prefix such as ``chatcmpl``. The Responses and Messages APIs call this, too."""
    info, model = served_model(request.app)
    prompt = await run_in_thread_if_large(request, chat_prompt, request, chat)
    choices = Choices(prefix, model, [prompt], info)
    return await choices.start(request.app.state.client, request)


async def count_prompt_tokens(request: Request, chat: ChatRequest) -> int:
    """Count the tokens of a chat's prompt, without running it."""
    prompt = await run_in_thread_if_large(request, chat_prompt, request, chat)
    query = msgspec.structs.replace(prompt, request_id=new_request_id("tokens"), only_tokens=True)
    tokens = await request.app.state.client.query(query, request.receive)
    return len(tokens.token_ids)


@router.post("/v1/chat/completions", **route_docs(ChatCompletionResponse, ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation."""
    chat = await parse_request(ChatRequest, request)
    choices = await start_chat(request, chat, "chatcmpl")
    if chat.stream:
        return EventStreamResponse(choices, _ChatEvents(choices, chat))
    outputs = [_JoinedOutput(chat) for _ in choices.output_ids]
    await choices.collect(lambda index, text: outputs[index].add(text))
    joined = [output.choice(index) for index, output in enumerate(outputs)]
    usage = choices.usage()
    return json_response(choices.body("chat.completion", joined, usage=usage, **outputs[0].prompt_fields))


class _JoinedOutput:
    """Joins the parts of one output of a response that is not streamed."""

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._token_ids: list[int] = []
        self.prompt_fields: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        """First delta of each call, and pieces of its arguments."""
        self._logprobs: list[dict[str, Any]] | None = None
        self._last = Text(request_id="", text="", token_ids=[])

    def add(self, text: Text) -> None:
        self._pieces.append(text.text)
        self._reasoning.append(text.reasoning)
        for delta in text.tool_calls:
            if delta.id is not None:
                self._calls.append((delta, []))
            self._calls[delta.index][1].append(delta.arguments)
        self._last = text
        self._token_ids += text.token_ids
        for name, values in prompt_fields(self._chat, text).items():
            self.prompt_fields.setdefault(name, []).extend(values)
        if (logprobs := chat_logprobs(text, bool(self._chat.return_tokens_as_token_ids))) is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += logprobs["content"]

    def choice(self, index: int) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces), "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": "".join(arguments)}}
                for first, arguments in self._calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.stop_reason,
            **({"token_ids": self._token_ids} if self._chat.return_token_ids else {}),
        }


class _ChatEvents(ChoiceEvents):
    def __init__(self, choices: Choices, chat: ChatRequest) -> None:
        super().__init__(choices, "chat.completion.chunk", chat.stream_options)
        self._tokens_as_ids, self._returns_ids = bool(chat.return_tokens_as_token_ids), bool(chat.return_token_ids)

    def begin(self) -> bytes:
        """Return one event per choice, with its role."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self.chunk(_choice(index, role)) for index in range(len(self._choices.output_ids)))

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        choice = _choice(index, _delta(text))
        choice["logprobs"] = chat_logprobs(text, self._tokens_as_ids)
        if self._returns_ids:
            choice["token_ids"] = text.token_ids
        if text.finish_reason is not None:
            choice |= {"finish_reason": text.finish_reason, "stop_reason": text.stop_reason}
        return choice

    def output(self, index: int, text: Text) -> bytes:
        """Return the chunk with new output. That of the first output, which alone gets them, has the prompt's token ids."""
        if not self._returns_ids or text.prompt_token_ids is None:
            return super().output(index, text)
        return self.chunk(self.choice(index, text), prompt_token_ids=text.prompt_token_ids)


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(text: Text) -> dict[str, Any]:
    """Return new output as the ``delta`` of a chunk."""
    delta: dict[str, Any] = {}
    if text.reasoning:
        delta["reasoning_content"] = delta["reasoning"] = text.reasoning
    if text.tool_calls:
        delta["tool_calls"] = [_call_delta(each) for each in text.tool_calls]
    if text.text or not delta:
        delta["content"] = text.text
    return delta


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
