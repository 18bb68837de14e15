"""``POST /generate``, as SGLang's users know it: a text or tokens in, text and tokens out."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import EngineInfo, Logprob, Text, Tokenize
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.answers import GenerateAnswer, GenerateAnswers
from minisgl_server.api.choices import Choices, json_response, parse, served_model
from minisgl_server.api.completions import named_prompts
from minisgl_server.api.forms import only_form
from minisgl_server.api.limits import Bound
from minisgl_server.api.openapi import documented
from minisgl_server.api.sampling import Wanted
from minisgl_server.api.schemas import SamplingFields
from minisgl_server.api.streaming import Chunks, EventStream, event
from minisgl_server.api.strict import Int, Strict, TokenId

router = APIRouter()

GENERATE_MAX_TOKENS = 128
"""SGLang's default."""


class GenerateSampling(SamplingFields):
    """How to sample. Names are SGLang's, and this project's own where those differ."""

    max_new_tokens: Int | None = Field(
        None, description="Most tokens to generate; by default 128, or what the context has room for."
    )
    min_new_tokens: Int | None = None
    sampling_seed: Int | None = Field(None, description="Another name for seed.")
    no_stop_trim: bool | None = Field(None, description="Another name for include_stop_str_in_output.")
    json_schema: str | dict[str, Any] | None = Field(None, description="The output is JSON that fits this schema.")
    regex: str | None = Field(None, description="The output is a text that this pattern matches, as a whole.")
    ebnf: str | None = Field(None, description="The output is a sentence of this grammar, from `root`.")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="Free text, in which each of its `triggers` begins one of its `structures`."
    )


_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""Fields that say what the output must be, and what `StructuredOutputs` calls them."""


class GenerateRequest(Strict):
    """Body of ``POST /generate``: exactly one of text, prompt and input_ids."""

    text: Annotated[str | list[str] | None, Bound.OUTPUTS] = Field(None, description="A prompt, or several.")
    prompt: Annotated[str | list[str] | None, Bound.OUTPUTS] = Field(None, description="Another name for text.")
    input_ids: Annotated[list[TokenId] | list[list[TokenId]] | None, Bound.OUTPUTS] = Field(
        None, description="A prompt in tokens, or several."
    )
    sampling_params: GenerateSampling | None = None
    max_tokens: Int | None = Field(None, description="Another name for sampling_params.max_new_tokens.")
    ignore_eos: bool | None = Field(None, description="Another name for sampling_params.ignore_eos.")
    stream: bool | None = Field(None, description="Send events; each has all of the text so far.")
    return_logprob: bool | None = None
    top_logprobs_num: Int | None = Field(None, description="How many most likely tokens to tell with return_logprob.")
    priority: Int | None = Field(None, description="Lower runs first; 0 by default.")


@router.post("/generate", **documented(GenerateRequest, GenerateAnswers, streams=GenerateAnswer, errors=(400,)))
async def generate(request: Request) -> Response:
    """Continue one or more prompts; several prompts or outputs give a list of answers."""
    started_s = time.perf_counter()
    client = request.app.state.client
    info, model = served_model(request.app)
    asked = await parse(GenerateRequest, request)
    prompts, is_single = _prompts(asked)
    wanted, form_name = generate_sampling(asked, info)
    messages = [
        Tokenize(
            request_id="",
            sampling=wanted.sampling,
            max_tokens_is_default=wanted.max_tokens_is_default,
            priority=asked.priority or 0,
            form_name=form_name,
            field_names={**wanted.names, "prompt": name},
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
        )
        for name, prompt in prompts.items()
    ]
    choices = Choices("gen", model, messages, info)
    outputs = [_Output(output_id, started_s) for output_id in choices.output_ids]
    generation, first = await choices.start(client, request)
    is_single = is_single and len(outputs) == 1
    if asked.stream:
        return EventStream(choices, generation, first, _Chunks(outputs, is_single))
    try:
        while first:
            for place, text in first:
                outputs[place].add(text)
            first = await choices.more(generation)
    finally:
        generation.close()
    answers = [output.answer() for output in outputs]
    return json_response(answers[0] if is_single else answers)


class _Output:
    """One output, all of it so far."""

    def __init__(self, name: str, started_s: float) -> None:
        self._name, self._started_s = name, started_s
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[Any] | None = None
        self._top_logprobs: list[Any] = []
        self._last = Text(request_id="", text="", token_ids=[])

    def add(self, text: Text) -> None:
        """Take in what is new."""
        self._text += text.text
        self._token_ids += text.token_ids
        self._last = text
        if text.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += [_logprob(place.token) for place in text.logprobs]
            self._top_logprobs += [[_logprob(entry) for entry in place.top] for place in text.logprobs]

    def answer(self) -> dict[str, Any]:
        """In SGLang's form."""
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
        return {"text": self._text, "output_ids": self._token_ids, "meta_info": meta}


class _Chunks(Chunks):
    def __init__(self, outputs: list[_Output], is_single: bool) -> None:
        self._outputs, self._is_single = outputs, is_single

    def new(self, place: int, text: Text) -> bytes:
        self._outputs[place].add(text)
        return event(self._outputs[place].answer() | ({} if self._is_single else {"index": place}))


def _logprob(entry: Logprob) -> tuple[float, int, None]:
    """The last place is the token's text in SGLang, which leaves it out unless asked."""
    return entry.logprob, entry.token_id, None


def _finish_reason(last: Text, token_ids: list[int]) -> dict[str, Any] | None:
    if last.finish_reason is None:
        return None
    if last.finish_reason == "length":
        return {"type": "length", "length": len(token_ids)}
    return {"type": last.finish_reason, "matched": token_ids[-1] if last.stop_reason is None else last.stop_reason}


def _prompts(asked: GenerateRequest) -> tuple[dict[str, Any], bool]:
    """Prompts by what the request calls them, and whether there is one, given alone and not in a list."""
    given = {name: value for name in ("text", "prompt", "input_ids") if (value := getattr(asked, name)) is not None}
    if len(given) != 1:
        raise InvalidValueError("text", ", ".join(given) or None, "exactly one of text, prompt and input_ids")
    [(name, prompt)] = given.items()
    prompts = named_prompts(name, prompt)
    return prompts, name in prompts


def generate_sampling(asked: GenerateRequest, info: EngineInfo) -> tuple[Wanted, str]:
    """How it is sampled, and the name of the field that says what the output must be, if one does."""
    given = {} if asked.sampling_params is None else asked.sampling_params.model_dump(exclude_none=True)
    forms = {f"sampling_params.{name}": {_FORMS[name]: given.pop(name)} for name in _FORMS if name in given}
    form, form_name = only_form(forms)
    values: dict[str, Any] = {**info.default_sampling, "structured_outputs": form}
    names: dict[str, str] = {}
    sources = [(f"sampling_params.{name}", _NAMES.get(name, name), value) for name, value in given.items()]
    sources += [
        (name, name, value) for name in ("max_tokens", "ignore_eos") if (value := getattr(asked, name)) is not None
    ]
    for source, name, value in sources:
        if name in names:
            raise InvalidValueError(source, value, f"left out where {names[name]} is given")
        names[name], values[name] = source, value
    if asked.top_logprobs_num is not None and not asked.return_logprob:
        raise InvalidValueError("top_logprobs_num", asked.top_logprobs_num, "left out unless return_logprob is true")
    if asked.return_logprob:
        values["logprobs"], names["logprobs"] = asked.top_logprobs_num or 0, "top_logprobs_num"
    if is_default := "max_tokens" not in values:
        values["max_tokens"] = max(GENERATE_MAX_TOKENS, values.get("min_tokens", 0))
    try:
        return Wanted(SamplingParams(**values), is_default, names), form_name
    except InvalidValueError as error:
        raise error.renamed(names) from None
