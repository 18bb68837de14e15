"""Route ``POST /generate`` of SGLang: takes a text or token ids, and returns text and token ids."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from minisgl_core.errors import InvalidValueError, Summary
from minisgl_core.protocol.messages import EngineInfo, Logprob, Text
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.limits import Bound
from minisgl_server.api.openai.choices import Choices
from minisgl_server.api.openai.completions import prompts_by_field
from minisgl_server.api.openai.event_stream import EventStreamResponse, StreamEvents, event
from minisgl_server.api.openai.requests import json_response, parse_request, served_model
from minisgl_server.api.openai.response_format import single_structured_output, structured_fields
from minisgl_server.api.openai.sampling import RequestSampling
from minisgl_server.api.openai.schemas import STRUCTURAL_TAG, SamplingFields, SglangStructuredFields
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.response_models import GenerateResponses
from minisgl_server.api.strict_model import Int, StrictModel, TokenId

router = APIRouter()

GENERATE_MAX_TOKENS = 128
"""SGLang's default of max_new_tokens."""
_MAX_REPEATS = 64
"""Approximate maximum ratio of the bytes of all events of an output to those of its last event.

Each event repeats the whole output, as in SGLang. With one event per token, the bytes would be quadratic in the output's length.
So an event is sent only when 1 / `_MAX_REPEATS` of the output is new.
"""


class GenerateSamplingParams(SamplingFields, SglangStructuredFields):
    """Sampling parameters by SGLang's names, and by the names of the other routes where those differ."""

    max_new_tokens: Int | None = Field(
        None, description="Maximum number of tokens to generate; 128 by default, or as many as fit the context."
    )
    min_new_tokens: Int | None = None
    sampling_seed: Int | None = Field(None, description="Alias of seed.")
    no_stop_trim: bool | None = Field(None, description="Alias of include_stop_str_in_output.")
    structural_tag: dict[str, Any] | str | None = Field(None, description=STRUCTURAL_TAG)


_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Names in `SamplingParams` of the fields that SGLang calls differently."""


class GenerateRequest(StrictModel):
    """Body of ``POST /generate``: exactly one of text, prompt and input_ids."""

    text: Annotated[str | list[str] | None, Bound.OUTPUTS] = Field(None, description="One prompt or several.")
    prompt: Annotated[str | list[str] | None, Bound.OUTPUTS] = Field(None, description="Alias of text.")
    input_ids: Annotated[list[TokenId] | list[list[TokenId]] | None, Bound.OUTPUTS] = None
    sampling_params: GenerateSamplingParams | None = None
    max_tokens: Int | None = Field(None, description="Alias of sampling_params.max_new_tokens.")
    ignore_eos: bool | None = Field(None, description="Alias of sampling_params.ignore_eos.")
    stream: bool | None = Field(None, description="Stream server-sent events; each has the whole text so far.")
    return_logprob: bool | None = None
    top_logprobs_num: Int | None = Field(None, description="Number of top tokens per position, with return_logprob.")
    priority: Int | None = Field(None, description="Lower values run first; 0 by default.")


@router.post("/generate", **route_docs(GenerateResponses, GenerateRequest))
async def generate(request: Request) -> Response:
    """Continue one or more prompts; several prompts or outputs give a list of responses."""
    started_s = time.perf_counter()
    info, model = served_model(request.app)
    body = await parse_request(GenerateRequest, request)
    prompts, is_single = _prompts(body)
    sampling = generate_sampling(body, info)
    messages = [
        sampling.tokenize(name, priority=body.priority or 0, is_streamed=bool(body.stream), **prompt)
        for name, prompt in prompts.items()
    ]
    choices = Choices("gen", model, messages, info, is_buffered=True)
    outputs = [GeneratedOutput(output_id, started_s) for output_id in choices.output_ids]
    await choices.start(request.app.state.client, request)
    is_single = is_single and len(outputs) == 1
    if body.stream:
        return EventStreamResponse(choices, GenerateEvents(outputs, is_single))
    await choices.collect(lambda index, text: outputs[index].add(text))
    responses = [output.response() for output in outputs]
    return json_response(responses[0] if is_single else responses)


class GeneratedOutput:
    """Collects one output."""

    def __init__(self, name: str, started_s: float) -> None:
        self._name, self._started_s = name, started_s
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._num_sent = 0
        """Number of tokens in the last event."""
        self._logprobs: list[Any] | None = None
        self._top_logprobs: list[Any] = []
        self._last = Text(request_id="", text="", token_ids=[])

    def add(self, text: Text) -> None:
        self._pieces.append(text.text)
        self._token_ids += text.token_ids
        self._last = text
        if text.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += [_logprob(each.token) for each in text.logprobs]
            self._top_logprobs += [[_logprob(entry) for entry in each.top] for each in text.logprobs]

    def take_event(self) -> dict[str, Any] | None:
        """Return the response for an event, or None if there is too little new output for one."""
        num_new = len(self._token_ids) - self._num_sent
        if self._last.finish_reason is None and num_new < len(self._token_ids) // _MAX_REPEATS:
            return None
        self._num_sent = len(self._token_ids)
        return self.response()

    def response(self) -> dict[str, Any]:
        """Return all output so far, in SGLang's format."""
        last = self._last
        meta: dict[str, Any] = {
            "id": self._name,
            "finish_reason": _finish_reason(last, self._token_ids),
            "prompt_tokens": last.num_prompt_tokens,
            "completion_tokens": len(self._token_ids),
            "cached_tokens": last.num_cached_tokens,
            "e2e_latency": time.perf_counter() - self._started_s,
        }
        if self._logprobs is not None:
            meta["output_token_logprobs"], meta["output_top_logprobs"] = self._logprobs, self._top_logprobs
        return {"text": "".join(self._pieces), "output_ids": self._token_ids, "meta_info": meta}


class GenerateEvents(StreamEvents):
    """Encodes outputs as events, each with the whole output so far.

    Outputs that arrive together give one event, so a client that reads slowly gets fewer events. The memory for those that it has
    not read is bounded by the size of the whole response.
    """

    def __init__(self, outputs: list[GeneratedOutput], is_single: bool) -> None:
        self._outputs, self._is_single = outputs, is_single

    def outputs(self, outputs: Sequence[tuple[int, Text]]) -> bytes:
        for index, text in outputs:
            self._outputs[index].add(text)
        return b"".join([self._event(index) for index in dict.fromkeys(index for index, _ in outputs)])

    def output(self, index: int, text: Text) -> bytes:
        return self.outputs([(index, text)])

    def _event(self, index: int) -> bytes:
        response = self._outputs[index].take_event()
        if response is None:
            return b""
        return event(response if self._is_single else response | {"index": index})


def _logprob(entry: Logprob) -> tuple[float, int, None]:
    """Return an entry in SGLang's format. Its last item is the token's text, which SGLang omits by default."""
    return entry.logprob, entry.token_id, None


def _finish_reason(last: Text, token_ids: list[int]) -> dict[str, Any] | None:
    """Return the finish reason in SGLang's format. ``matched`` is the stop string or token, or the EOS token at the end."""
    if last.finish_reason is None:
        return None
    if last.finish_reason == "length":
        return {"type": "length", "length": len(token_ids)}
    return {"type": last.finish_reason, "matched": token_ids[-1] if last.stop_reason is None else last.stop_reason}


def _prompts(body: GenerateRequest) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the prompts by field name, see `prompts_by_field`, and True if the field holds one prompt instead of a list."""
    given = {name: value for name in ("text", "prompt", "input_ids") if (value := getattr(body, name)) is not None}
    if len(given) != 1:
        raise InvalidValueError("text", Summary(", ".join(given)) or None, "exactly one of text, prompt and input_ids")
    [(name, prompt)] = given.items()
    prompts = prompts_by_field(name, prompt)
    return prompts, name in prompts


def generate_sampling(body: GenerateRequest, info: EngineInfo) -> RequestSampling:
    """Return the sampling parameters."""
    given = {} if body.sampling_params is None else body.sampling_params.model_dump(exclude_none=True)
    requested = structured_fields(given)
    given = {name: value for name, value in given.items() if name not in requested}
    requested = {f"sampling_params.{name}": arguments for name, arguments in requested.items()}
    structured_outputs, grammar_name = single_structured_output(requested)
    values: dict[str, Any] = {**info.default_sampling, "structured_outputs": structured_outputs}
    names: dict[str, str] = {}
    sources = [(f"sampling_params.{name}", _NAMES.get(name, name), value) for name, value in given.items()]
    top_level = ("max_tokens", "ignore_eos")
    sources += [(name, name, value) for name in top_level if (value := getattr(body, name)) is not None]
    for source, name, value in sources:
        if name in names:
            raise InvalidValueError(source, value, f"left out if {names[name]} is given")
        names[name], values[name] = source, value
    if body.top_logprobs_num is not None and not body.return_logprob:
        raise InvalidValueError("top_logprobs_num", body.top_logprobs_num, "left out unless return_logprob is true")
    if body.return_logprob:
        values["logprobs"], names["logprobs"] = body.top_logprobs_num or 0, "top_logprobs_num"
    if is_default := "max_tokens" not in values:
        values["max_tokens"] = max(GENERATE_MAX_TOKENS, values.get("min_tokens", 0))
    try:
        return RequestSampling(SamplingParams(**values), is_default, names, grammar_name)
    except InvalidValueError as error:
        raise error.renamed(names) from None
