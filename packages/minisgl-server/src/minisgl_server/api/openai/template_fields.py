"""Fields of a chat that control the chat template and the reasoning parser."""

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.openai.schemas import ChatRequest
from minisgl_server.api.unsupported_fields import UNSUPPORTED_REASONS


def template_fields(chat: ChatRequest, trusts_chat_templates: bool) -> dict[str, Any]:
    """Return the fields of `Tokenize` that control the chat template and the reasoning parser."""
    if chat.chat_template is not None and not trusts_chat_templates:
        raise InvalidValueError("chat_template", chat.chat_template, "left out", UNSUPPORTED_REASONS["chat_template"])
    if chat.continue_final_message and chat.add_generation_prompt:
        allowed = "false or left out if continue_final_message is true"
        raise InvalidValueError("add_generation_prompt", True, allowed)
    if chat.include_reasoning is False and chat.separate_reasoning is False:
        allowed = "true or left out if separate_reasoning is false, which leaves reasoning content in the text"
        raise InvalidValueError("include_reasoning", False, allowed)
    add_generation_prompt = (
        not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    )
    return {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": bool(chat.continue_final_message),
        "chat_template": chat.chat_template,
        "documents": chat.documents,
        "template_hints": effort_hints(chat.reasoning_effort),
        "hints_name": "" if chat.reasoning_effort is None else "reasoning_effort",
        "include_reasoning": chat.include_reasoning is not False,
        "separate_reasoning": chat.separate_reasoning is not False,
    }


def effort_hints(effort: str | None) -> dict[str, Any]:
    """Return the chat template variables of a reasoning effort; see `Tokenize.template_hints`."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
