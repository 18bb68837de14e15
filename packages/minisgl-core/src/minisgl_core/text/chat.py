"""Rendering of conversations with the model's chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import Filter, For, Node, Test
from jinja2.parser import Parser

from minisgl_core.errors import InvalidValueError
from minisgl_core.text.render_limit import run_limited
from minisgl_core.text.template_numbers import check_numbers
from minisgl_core.utils.exceptions import shortened

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"assistant": {"tool_calls", "reasoning_content", "reasoning"}, "tool": {"tool_call_id"}}
"""Fields of a message, by role, besides role, content and name."""
_EMPTY = {"tool_calls", "annotations"}
"""Fields that other servers send as empty lists; an empty one is dropped."""
_RESERVED = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "conversation"}
)
"""Parameters of ``apply_chat_template``, which ``chat_template_kwargs`` must not set. `render_chat` sets some of them itself."""


Apply = Callable[[Any, list[dict[str, Any]], Mapping[str, Any]], str]
"""Function that renders messages with a tokenizer and options of its ``apply_chat_template``."""


class _Generation(Extension):
    """``{% generation %}``: templates mark the assistant's tokens for training with it, and rendering drops the tag."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Return the enclosed nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_JINJA = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
"""Environment with the tags that transformers supports. It only parses templates and does not render them."""


def read_chat_template(file_or_text: str) -> str:
    """Return the Jinja template of ``--chat-template``, which is a file or the template itself."""
    allowed = "a file with a Jinja template, or such a template itself"
    text = file_or_text
    try:
        if "{%" not in text and "{{" not in text:
            text = Path(file_or_text).expanduser().read_text(encoding="utf-8")
        _JINJA.parse(text)
    # A ValueError for text that is not UTF-8 and for a path with a NUL byte, a RuntimeError for the ~ of an unknown user.
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidValueError("--chat-template", file_or_text, allowed, f"It cannot be read: {error}.") from None
    except TemplateSyntaxError as error:
        why = f"Line {error.lineno}: {error.message}."
        raise InvalidValueError("--chat-template", file_or_text, allowed, why) from None
    return text


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    apply: Apply | None = None,
) -> str:
    """Render a conversation with the chat template, up to the beginning of the assistant's answer.

    The function is long because it documents all options and checks each of them.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: each has ``role`` and ``content``; a content is a text or a list of ``{"type": "text", "text": ...}``.
            A ``developer`` message becomes a system message if the template does not know the role. An ``assistant`` message may
            have ``tool_calls`` and ``reasoning_content``, also called ``reasoning``. A ``tool`` message may have the
            ``tool_call_id`` that it answers, and any message a ``name``, which few templates use.
        chat_template_kwargs: variables of the template, such as ``enable_thinking``.
        tools: functions that the model may call, as OpenAI's API describes them.
        add_generation_prompt: end with the tokens that start the assistant's turn; otherwise with the last message.
        continue_final_message: leave the last message open, so that the answer continues it; as in transformers.
        documents: documents for the template, which must have that variable.
        chat_template: template to use instead of the tokenizer's.
        apply: function to use instead of ``tokenizer.apply_chat_template``, for example to render in another process.

    Raises:
        InvalidValueError: there is no template or no message, a message is not valid, or the template does not have a variable
            that is set. Also raised if the template fails, refuses the conversation, or exceeds the limits of
            `minisgl_core.text.render_limit`.
    """
    template = tokenizer.chat_template if chat_template is None else chat_template
    if template is None:
        remedy = "This model has none and takes plain prompts only; --chat-template can supply one."
        raise InvalidValueError("messages", messages, "sent to a model that has a chat template", remedy)
    if not messages:
        raise InvalidValueError("messages", [], "at least one message")
    if isinstance(template, Mapping):  # named templates, of which transformers selects this one
        template = template.get("tool_use" if tools and "tool_use" in template else "default", "")
    template = str(template)
    for name in chat_template_kwargs or {}:
        if name in _RESERVED or name not in template:
            raise InvalidValueError("chat_template_kwargs", name, "a variable of the model's chat template")
    plain = plain_messages(messages, "developer" in template)
    if "message.thinking" in template and "reasoning_content" not in template:
        plain = [_with_thinking(message) for message in plain]
    options = dict(chat_template_kwargs or {})
    for name, given in (("tools", tools), ("documents", documents)):
        if given and name not in template:
            raise InvalidValueError(name, given, f"left out: the model's chat template does not show {name}")
        if given:
            options[name] = [dict(each) for each in given]
    options["add_generation_prompt"] = add_generation_prompt
    if continue_final_message:
        options["continue_final_message"] = True
    if chat_template is not None:
        options["chat_template"] = chat_template
    try:
        return (apply or _apply)(tokenizer, plain, options)
    except Exception as error:  # a template is a program and may raise anything
        allowed, why = "a conversation that the model's chat template accepts", str(error) or type(error).__name__
        remedy = f"It says: {shortened(why, 500)}"
        raise InvalidValueError("messages", [message["role"] for message in plain], allowed, remedy) from error


def _apply(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Render with the tokenizer, within the limits on time, memory and numbers."""

    def render() -> str:
        template = options.get("chat_template", tokenizer.chat_template)
        check_numbers(_JINJA, template)
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        shows_all = all(each["content"].strip() in text for each in messages if each["role"] == "user")
        if not shows_all and any(
            map(_loops_over_content, template.values() if isinstance(template, dict) else [template])
        ):
            chat = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
            text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
        return text

    return run_limited(render)


@lru_cache(maxsize=16)
def _loops_over_content(template: str) -> bool:
    """Return True if a template loops over the parts of a content and has no case for a string, as those of LLaVA do.

    Such a template may leave out a content that is a string.
    """
    parsed, looped = _JINJA.parse(template), []
    for loop in parsed.find_all(For):
        source: Any = loop.iter
        while isinstance(source, Filter):
            source = source.node
        key = getattr(source, "arg", None)  # of message["content"]
        looped += [getattr(source, "name", None), getattr(source, "attr", None), getattr(key, "value", None)]
    return "content" in looped and all(test.name != "string" for test in parsed.find_all(Test))


def plain_messages(messages: Sequence[Mapping[str, Any]], knows_developer: bool = True) -> list[dict[str, Any]]:
    """Return messages whose contents are texts and whose tool calls have arguments as objects.

    The role ``developer`` becomes ``system`` unless `knows_developer`. The error of an invalid message names its field.
    """
    return [_plain(message, index, knows_developer) for index, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], index: int, knows_developer: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidValueError(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidValueError(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    given = {key: value for key, value in message.items() if value is not None and not (key in _EMPTY and value == [])}
    more = {name: value for name, value in given.items() if name not in ("role", "content")}
    for name in sorted(more):
        if name != "name" and name not in _FIELDS.get(role, ()):
            raise InvalidValueError(f"{where}.{name}", more[name], "left out: it is not supported")
    if "reasoning" in more:
        reasoning = more.pop("reasoning")
        if more.setdefault("reasoning_content", reasoning) != reasoning:
            raise InvalidValueError(f"{where}.reasoning", reasoning, "the same as reasoning_content, or left out")
    if "tool_calls" in more:
        more["tool_calls"] = _tool_calls(more["tool_calls"], f"{where}.tool_calls")
    content = message.get("content")
    if content is None and ("tool_calls" in more or "reasoning_content" in more):
        content = ""
    if role == "developer" and not knows_developer:
        role = "system"
    return {"role": role, "content": _content_text(content, f"{where}.content"), **more}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning content is called ``thinking``, as the template of gpt-oss reads it.

    It is left out where that template fails: beside content and calls, and with tags of channels. Some versions of transformers
    set ``thinking`` from ``reasoning_content``, but also there.
    """
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    reasoning = message.get("reasoning_content")
    if not reasoning or "<|channel|>" in reasoning or (message["content"] and "tool_calls" in message):
        return rest
    return {**rest, "thinking": reasoning}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls whose arguments are objects, as templates expect; arguments that are no object stay text."""
    if not isinstance(calls, list) or not calls:
        raise InvalidValueError(where, calls, "a list of one or more calls")
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            allowed = 'of the form {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise InvalidValueError(f"{where}[{index}]", call, allowed)
        arguments = function.get("arguments", "{}")
        try:
            parsed = _loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, Mapping):
            if not isinstance(arguments, str):
                raise InvalidValueError(f"{where}[{index}].function.arguments", arguments, "a JSON object, as text")
            parsed = arguments  # a truncated or malformed call, which the model should see unchanged
        plain.append({**call, "type": "function", "function": {**function, "arguments": parsed}})
    return plain


def _loads(text: str) -> Any:
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()  # fails for a lone surrogate, which cannot be encoded
    return value


def _content_text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValueError(name, content, "a string or a list of text parts")
    for index, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise InvalidValueError(f"{name}[{index}]", part, 'of the form {"type": "text", "text": ...}')
    return "".join(part["text"] for part in content)
