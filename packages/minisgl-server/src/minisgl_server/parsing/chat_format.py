"""How one model chats: its template on the way in, its tags on the way out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import Tokenize, ToolCallDelta, ToolUse
from minisgl_core.structured_outputs import GrammarSource
from minisgl_core.text.chat import plain_messages, render_chat
from minisgl_server.parsing.reasoning import BEGIN, END, ReasoningSplitter, begins_inside
from minisgl_server.parsing.request_template import render_in_process
from minisgl_server.parsing.tool_parser import TOOL_PARSERS, ToolParser, tool_parser_of

AUTO, NONE = "auto", "none"
_JSON_KINDS = {"json_schema", "json_object"}


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What is new of an output: thoughts, text for the user, and tool calls."""

    reasoning: str
    content: str
    tool_calls: list[ToolCallDelta]


class ChatParser:
    """Takes one chat's output apart. Without splitter and tools, all of it is content."""

    def __init__(
        self, splitter: ReasoningSplitter | None, tools: ToolParser | None, include_reasoning: bool = True
    ) -> None:
        """Without `include_reasoning`, reasoning content is dropped."""
        self._splitter, self._tools, self._include_reasoning = splitter, tools, include_reasoning
        self.num_reasoning_tokens = 0
        """Tokens of reasoning content so far, its tags included."""

    @property
    def is_done(self) -> bool:
        """Whether the output is to end here."""
        return self._tools is not None and self._tools.is_done

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, finished: bool, num_tokens: int = 0) -> ParsedText:
        """Take the text of `num_tokens` tokens; with `finished`, nothing is held back any more."""
        reasoning, content = "", text
        if self._splitter is not None:
            was_open = self._splitter.is_open
            reasoning, content = self._splitter.push(text, finished)
            self.num_reasoning_tokens += num_tokens * was_open
            if not self._splitter.has_begun:
                self.num_reasoning_tokens *= self._splitter.is_open  # there was no reasoning after all
            reasoning = reasoning if self._include_reasoning else ""
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            content, calls = self._tools.push(content, finished)
        return ParsedText(reasoning, content, calls)


class ChatFormat:
    """Renders conversations and makes the parsers of their answers."""

    def __init__(
        self, tokenizer: Any, tool_parser: str, reasoning_parser: str | None, template: str | None = None
    ) -> None:
        """Read the template.

        Args:
            tokenizer: a transformers tokenizer.
            tool_parser: a name of `TOOL_PARSERS`, auto (by the template) or none.
            reasoning_parser: a name of `REASONING_PARSERS`; None for none.
            template: a request's own, instead of the tokenizer's.
        """
        self._tokenizer, self._reasoning_parser, self._own_template = tokenizer, reasoning_parser, template
        self._asked_tool_parser = tool_parser
        self._template = str((template or tokenizer.chat_template) or "")
        name = tool_parser_of(self._template) if tool_parser == AUTO else tool_parser
        self._tool_parser = TOOL_PARSERS.get(name or NONE)
        self._knows_calls = "tools" in self._template or "tool_calls" in self._template
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def using(self, template: str | None) -> ChatFormat:
        """The same with a request's own template, if it has one."""
        if template is None:
            return self
        return ChatFormat(self._tokenizer, self._asked_tool_parser, self._reasoning_parser, template)

    def render(self, chat: Tokenize) -> str:
        """The prompt.

        Raises:
            InvalidValueError: see `render_chat`; or there are tools, now or in the conversation, and the model is not known to
                write calls; or the model does not reason as the request asks.
        """
        assert chat.messages is not None
        self._check_reasoning(chat)
        messages: Sequence[Mapping[str, Any]] = chat.messages
        tools = None
        if chat.tools is not None:
            parser = self._parser_for_tools()
            if "tools" in self._template:
                tools = chat.tools.offered
            else:
                messages = with_tools(messages, chat.tools.offered, parser)
        elif (place := _first_use(messages)) is not None and not self._knows_calls:
            messages = without_calls(messages, self._parser_for_tools(f"messages[{place}]", "a call or its result"))
        return render_chat(
            self._tokenizer,
            messages,
            {**self._hints(chat), **chat.chat_template_kwargs},
            tools,
            chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            documents=chat.documents,
            chat_template=self._own_template,
            apply=None if self._own_template is None else render_in_process,
        )

    def _hints(self, chat: Tokenize) -> dict[str, Any]:
        """Return the hints that are variables of the template. Asking a model that never reasons for none is no error."""
        hints = {name: value for name, value in chat.template_hints.items() if name in self._template}
        is_none_anyway = chat.template_hints.get("enable_thinking") is False and BEGIN not in self._template
        if chat.hints_name and not hints and not is_none_anyway:
            allowed = f"left out, as the model's chat template has no variable {' or '.join(chat.template_hints)}"
            raise InvalidValueError(chat.hints_name, "given", allowed)
        return hints

    def _check_reasoning(self, chat: Tokenize) -> None:
        """Check that a request may choose where reasoning content goes."""
        if self._reasoning_parser is not None or BEGIN not in self._template:
            return
        if not chat.include_reasoning:
            allowed = "left out, as the server does not tell reasoning content from content"
            raise InvalidValueError("include_reasoning", False, allowed, "Launch it with --reasoning-parser.")

    def parser(self, chat: Tokenize, prompt: str, grammar: GrammarSource | None = None) -> ChatParser | None:
        """Of the answer to `prompt`, which follows `grammar`; None where all of it is content."""
        splitter = tools = None
        if self._reasoning_parser is not None and chat.separate_reasoning:
            # What a form holds for from the first token on is no thought.
            is_bound = grammar is not None and grammar.after_token is None and grammar.kind != "structural_tag"
            splitter = ReasoningSplitter(False if is_bound else self._begins_inside(chat, prompt))
        if chat.tools is not None:
            strict = chat.tools.strict_names if _is_structural(chat) else ()
            tools = self._parser_for_tools()(chat.tools.names, chat.tools.parallel, strict)
        return None if splitter is None and tools is None else ChatParser(splitter, tools, chat.include_reasoning)

    def _begins_inside(self, chat: Tokenize, prompt: str) -> bool | None:
        """Return if the output goes on with reasoning content; see `begins_inside`."""
        assert self._reasoning_parser is not None
        if chat.continue_final_message and chat.messages:
            said = plain_messages(chat.messages[-1:])[0]["content"]
            if said.strip():
                return bool(said.rfind(BEGIN) > said.rfind(END))
        return begins_inside(self._reasoning_parser, prompt)

    def needs_special_tokens(self, chat: Tokenize) -> bool:
        """Whether the tags are special tokens, which text leaves out otherwise."""
        tags = {BEGIN, END} if self._reasoning_parser is not None else set()
        if chat.tools is not None:
            parser = self._parser_for_tools()
            tags |= {parser.begin, parser.end}
        return bool(tags & self._special)

    def grammar(self, chat: Tokenize, prompt: str) -> GrammarSource | None:
        """What the answer must follow: the form asked for, calls of tools, or either; thoughts are free."""
        form = chat.sampling.structured_outputs
        source = form.source(chat.form_name) if form is not None else None
        if chat.tools is not None and _is_structural(chat):
            return self._strict_grammar(chat.tools)  # which leaves thoughts free by itself
        if chat.tools is not None and (chat.tools.is_required or source is not None):
            source = self._tool_grammar(chat.tools, source)
        if source is None or self._reasoning_parser is None:
            return source
        thinks, end = self._begins_inside(chat, prompt), self._token(END)
        if thinks is False or end is None:
            return source
        return msgspec.structs.replace(source, after_token=end, free_if_begun_by=None if thinks else self._token(BEGIN))

    def _token(self, tag: str) -> int | None:
        """The token that stands for a tag, if there is one."""
        token: int = self._tokenizer.convert_tokens_to_ids(tag)
        return token if self._tokenizer.decode([token]) == tag else None

    @staticmethod
    def argument_schemas(chat: Tokenize) -> list[tuple[str, str]]:
        """The schemas of the arguments of a chat's tools, by the names of their fields."""
        tools = chat.tools.tools if chat.tools is not None else []
        schemas = [(place, tool["function"].get("parameters")) for place, tool in enumerate(tools)]
        return [
            (f"tools[{place}].function.parameters", json.dumps(each)) for place, each in schemas if each is not None
        ]

    def _parser_for_tools(self, name: str = "tools", value: str = "given") -> type[ToolParser]:
        if self._tool_parser is None:
            raise InvalidValueError(
                name,
                value,
                "left out: how this model writes tool calls is not known from its chat template",
                f"Launch with --tool-call-parser {' or '.join(TOOL_PARSERS)}.",
            )
        return self._tool_parser

    def _strict_grammar(self, tools: ToolUse) -> GrammarSource:
        """Free text, in which calls of strict functions fit their schemas however they begin."""
        parser = self._parser_for_tools()
        structures, triggers, strict_names = [], [], set(tools.strict_names)
        for function in (tool["function"] for tool in tools.offered):
            is_strict = function["name"] in strict_names
            schema = arguments_schema(function) if is_strict else {"type": "object"}
            for trigger, begin, end in parser.spellings:
                # A tag is followed by a call of one of the functions; without, only strict ones are looked for.
                if is_strict or trigger == parser.begin:
                    triggers.append(trigger.replace("NAME", function["name"]))
                    structures.append({"begin": begin.replace("NAME", function["name"]), "schema": schema, "end": end})
        text = {"triggers": list(dict.fromkeys(triggers)), "structures": structures}
        return GrammarSource("structural_tag", json.dumps(text), "tools")

    def _tool_grammar(self, tools: ToolUse, form: GrammarSource | None) -> GrammarSource:
        otherwise = None
        if form is not None:
            if tools.is_required:
                raise InvalidValueError(form.name, form.text, "left out where tool_choice demands a call")
            if form.kind not in _JSON_KINDS:
                raise InvalidValueError(form.name, form.text, "a JSON schema where there are tools")
            otherwise = {"type": "object"} if form.kind == "json_object" else _schema(form)
        parser = self._parser_for_tools()
        chosen = [tool["function"] for tool in tools.offered if tools.named in (None, tool["function"]["name"])]
        prefix, suffix, separator = parser.tagged
        text = {
            "prefix": prefix,
            "schema": {"anyOf": [call_schema(function, parser.arguments_key) for function in chosen]},
            "suffix": suffix,
            "separator": separator,
            "max_items": None if tools.parallel else 1,
            "otherwise": otherwise,
        }
        return GrammarSource("tagged_json", json.dumps(text), "tools" if form is None else form.name)


def _is_structural(chat: Tokenize) -> bool:
    """Whether the output is free but for calls of strict functions."""
    tools, form = chat.tools, chat.sampling.structured_outputs
    return tools is not None and bool(tools.strict_names) and not tools.is_required and form is None


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """What a function takes, as a JSON schema; nothing where its parameters are left out."""
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def call_schema(function: Mapping[str, Any], arguments_key: str) -> dict[str, Any]:
    """What a call of a function is, as a JSON schema."""
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments_key: arguments_schema(function)},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], parser: type[ToolParser]
) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: as `without_calls`, and the system prompt describes the tools."""
    prefix, suffix, _ = parser.tagged
    call = f'{prefix}{{"name": <name of the function>, "{parser.arguments_key}": <object of its arguments>}}{suffix}'
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        ["You can call these functions, each described by a JSON object:", *lines, "To call one, answer:", call]
    )
    plain = without_calls(messages, parser)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def without_calls(messages: Sequence[Mapping[str, Any]], parser: type[ToolParser]) -> list[dict[str, Any]]:
    """Messages for a template that knows no calls: these and their results are texts."""
    return [_as_text(message, parser) for message in plain_messages(messages)]


def _first_use(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Where the first call, or result of one, is."""
    uses = (place for place, each in enumerate(messages) if each.get("tool_calls") or each.get("role") == "tool")
    return next(uses, None)


def _as_text(message: Mapping[str, Any], parser: type[ToolParser]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"Result of the function: {message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    prefix, suffix, separator = parser.tagged
    texts = [
        f'{prefix}{{"name": {json.dumps(each["function"]["name"])}, '
        f'"{parser.arguments_key}": {json.dumps(each["function"]["arguments"], ensure_ascii=False)}}}{suffix}'
        for each in calls
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": message["content"] + separator.join(texts)}


def _schema(form: GrammarSource) -> Any:
    try:
        return json.loads(form.text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(form.name, form.text, f"JSON ({error})") from None
