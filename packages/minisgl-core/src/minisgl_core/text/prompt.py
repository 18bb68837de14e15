"""Token ids from texts and chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from minisgl_core.errors import InvalidValueError

ROLES = ("system", "developer", "user", "assistant")
_RESERVED = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "conversation"}
)


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt (a text or a list of token ids) or several, as a list of prompts.

    Raises:
        InvalidValueError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidValueError("prompts", prompts, "a text, a list of token ids, or a list of those")
    return [prompts] if prompts and isinstance(prompts[0], Integral) else list(prompts)


def token_array(ids: Any) -> npt.NDArray[np.int32]:
    """A list of token ids as an array; what does not fit becomes an id that no vocabulary has.

    Raises:
        InvalidValueError: it is no list of whole numbers.
    """
    try:
        array = np.array(ids)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidValueError("prompt", ids, "a text or a list of token ids")
    return array.astype(np.int64).clip(-1, 2**31 - 1).astype(np.int32)


def encode_prompt(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    """Tokens of a plain text, with the BOS that the tokenizer adds if `add_special_tokens`."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokens of a conversation, up to where the assistant's answer begins.

    The template writes the BOS where the model wants one, so the tokenizer adds none.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: ``role`` and ``content`` each; a content is a text or a list of ``{"type": "text", "text": ...}``.
            A ``developer`` message is a system message to templates that do not know the role.
        chat_template_kwargs: variables of the template, such as ``enable_thinking``.

    Raises:
        InvalidValueError: no template, no messages, an unknown role, a content that is not text, a variable that the
            template does not have, or the template refuses the conversation.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidValueError(
            "messages",
            "a conversation",
            "sent to a model that has a chat template",
            "This one takes plain prompts only.",
        )
    if not messages:
        raise InvalidValueError("messages", [], "at least one message")
    for name in chat_template_kwargs or {}:
        if name in _RESERVED or name not in str(template):
            raise InvalidValueError("chat_template_kwargs", name, "a variable of the model's chat template")
    knows_developer = "developer" in str(template)
    plain = [_plain(message, place, knows_developer) for place, message in enumerate(messages)]
    try:
        text: str = tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
        )
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        raise InvalidValueError(
            "messages",
            [message["role"] for message in plain],
            "a conversation that the model's chat template accepts",
            f"It says: {error}",
        ) from error
    return encode_prompt(tokenizer, text, add_special_tokens=False)


def _plain(message: Mapping[str, Any], place: int, knows_developer: bool) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidValueError(f"messages[{place}].role", role, f"one of {', '.join(ROLES)}")
    unknown = sorted(set(message) - {"role", "content"})
    if unknown:
        raise InvalidValueError(f"messages[{place}].{unknown[0]}", message[unknown[0]], "left out: it is not supported")
    if role == "developer" and not knows_developer:
        role = "system"
    return {"role": role, "content": _content_text(content, f"messages[{place}].content")}


def _content_text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValueError(name, content, "a text or a list of text parts")
    for place, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise InvalidValueError(f"{name}[{place}]", part, 'of the form {"type": "text", "text": ...}')
    return "".join(part["text"] for part in content)
