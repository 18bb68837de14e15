"""Response objects of the Responses API: fields of the request, output items and usage."""

import time
import uuid
from typing import Any

from minisgl_server.api.openai.choices import Choices
from minisgl_server.api.openai.segments import Segment, Segments
from minisgl_server.api.openai_responses.schemas import ResponsesRequest

_REPEATED_FIELDS = {
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("user", "safety_identifier", "prompt_cache_key"),
}
"""Fields of a request that its response repeats unchanged."""
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def new_id(prefix: str) -> str:
    """Return a random id, which cannot be guessed."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseObject:
    """Collects the output of one response."""

    def __init__(self, request: ResponsesRequest, model: str, is_stored: bool, choices: Choices) -> None:
        self.id = new_id("resp")
        self.segments = Segments()
        self._choices = choices
        self._item_ids: dict[Segment, str] = {}
        self._common = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "store": is_stored,
            **_repeated_fields(request, choices),
        }

    def started(self) -> dict[str, Any]:
        """Return the response before any output."""
        return self._body("in_progress", [])

    def finished(self) -> dict[str, Any]:
        """Return the complete response."""
        is_truncated = self.segments.last.finish_reason == "length"
        items = [self.item(segment, "completed") for segment in self.segments.all]
        if is_truncated and items:
            items[-1]["status"] = "incomplete"
        body = self._body("incomplete" if is_truncated else "completed", items)
        body["usage"] = self._usage()
        if is_truncated:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        return body

    def failed(self, message: str) -> dict[str, Any]:
        """Return the response of a request that failed."""
        items = [self.item(segment, "incomplete") for segment in self.segments.all]
        error = {"code": "server_error", "message": message}
        return self._body("failed", items) | {"error": error, "usage": self._usage()}

    def item_id(self, segment: Segment) -> str:
        if segment not in self._item_ids:
            self._item_ids[segment] = new_id(_PREFIXES[segment.kind])
        return self._item_ids[segment]

    def item(self, segment: Segment, status: str, is_empty: bool = False) -> dict[str, Any]:
        """Return a segment as an output item; with `is_empty`, without its content."""
        item_id = self.item_id(segment)
        if segment.kind == "call":
            return {
                "id": item_id,
                "type": "function_call",
                "call_id": segment.call_id,
                "name": segment.name,
                "arguments": "" if is_empty else segment.content,
                "status": status,
            }
        content = [] if is_empty else [content_part(segment)]
        if segment.kind == "reasoning":
            return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._common,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._choices.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def content_part(segment: Segment, is_empty: bool = False) -> dict[str, Any]:
    """Return a segment's text as a content part; with `is_empty`, without the text."""
    text = "" if is_empty else segment.content
    if segment.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    logprobs = [] if is_empty else segment.logprobs
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _repeated_fields(request: ResponsesRequest, choices: Choices) -> dict[str, Any]:
    sampling, text = choices.sampling, request.text
    format = None if text is None or text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
    names = {"type", "name", "description", "parameters"}
    tools = [tool.model_dump(include=names) | {"strict": bool(tool.strict)} for tool in request.tools or ()]
    choice = request.tool_choice
    return {
        **request.model_dump(include=_REPEATED_FIELDS),
        "metadata": request.metadata or {},
        "tools": tools,
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": format or {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
    }
