"""Chat format of a model: the template renders its prompts, and parsers split its outputs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Tokenize, ToolCallDelta
from minisgl_core.text.chat import plain_messages, render_chat
from minisgl_server.parsing.harmony import HARMONY, HARMONY_TAGS, HarmonySplitter
from minisgl_server.parsing.reasoning_splitter import THINK_END, THINK_START, ReasoningSplitter, starts_with_reasoning
from minisgl_server.parsing.request_template import render_in_child_process
from minisgl_server.parsing.tagged_tool_parser import TaggedToolParser
from minisgl_server.parsing.tool_formats import TOOL_PARSERS, detect_tool_parser
from minisgl_server.parsing.tool_grammar import refuse_constraints, required_grammar, strict_grammar
from minisgl_server.parsing.tool_parser import HarmonyToolParser, ToolParser
from minisgl_server.parsing.tools_as_text import describe_tools_in_system_prompt, render_calls_as_text

AUTO, NONE = "auto", "none"
"""Values of ``--tool-call-parser`` that are not keys of `TOOL_PARSERS`."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """New output: reasoning content, content and tool calls."""

    reasoning: str
    content: str
    tool_calls: list[ToolCallDelta]


class ChatOutputParser:
    """Parses the output of one chat. Without a reasoning splitter and tools, all of it is content."""

    def __init__(
        self,
        splitter: ReasoningSplitter | HarmonySplitter | None,
        tools: ToolParser | None,
        include_reasoning: bool = True,
    ) -> None:
        """Create a parser; without `include_reasoning`, reasoning content is dropped."""
        self._splitter, self._tools, self._include_reasoning = splitter, tools, include_reasoning
        self.num_reasoning_tokens = 0
        """Number of tokens of reasoning content so far, including its tags."""

    @property
    def is_done(self) -> bool:
        """True if the output ends here, as no further tool call is allowed."""
        return self._tools is not None and self._tools.is_done

    @property
    def has_calls(self) -> bool:
        """True if a tool was called."""
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, finished: bool, num_tokens: int = 0) -> ParsedText:
        """Add the text of `num_tokens` tokens; with `finished`, nothing is held back."""
        reasoning, content = "", text
        if self._splitter is not None:
            may_be_reasoning = self._splitter.may_be_reasoning
            reasoning, content = self._splitter.push(text, finished)
            if may_be_reasoning:
                self.num_reasoning_tokens += num_tokens
            if not self._splitter.has_begun and not self._splitter.may_be_reasoning:
                self.num_reasoning_tokens = 0  # there was no reasoning after all
            reasoning = reasoning if self._include_reasoning else ""
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            content, calls = self._tools.push(content, finished)
        return ParsedText(reasoning, content, calls)


class ChatFormat:
    """Renders chats, and creates the grammars and parsers of their outputs."""

    def __init__(
        self, tokenizer: Any, tool_parser: str, reasoning_parser: str | None, template: str | None = None
    ) -> None:
        """Inspect the chat template: a request's own `template`, or else the tokenizer's.

        `tool_parser` is a key of `TOOL_PARSERS`, ``auto`` to detect it from the template, or ``none``. `reasoning_parser` is a
        key of `REASONING_PARSERS`, or None.
        """
        self._tokenizer, self._reasoning_parser, self._own_template = tokenizer, reasoning_parser, template
        self._tool_parser_option = tool_parser
        self._latest: ChatFormat | None = None
        """Latest result of `using`, which is called several times per request."""
        self._template = str((template or tokenizer.chat_template) or "")
        name = detect_tool_parser(self._template) if tool_parser == AUTO else tool_parser
        self._tool_parser = None if name in (None, NONE) else TOOL_PARSERS[name]
        self._template_has_calls = "tools" in self._template or "tool_calls" in self._template
        self._special_tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def using(self, template: str | None) -> "ChatFormat":
        """Return the format for a request's own chat template; itself if the request has none."""
        if template is None:
            return self
        if self._latest is None or self._latest._own_template != template:
            self._latest = ChatFormat(self._tokenizer, self._tool_parser_option, self._reasoning_parser, template)
        return self._latest

    def render(self, chat: Tokenize) -> str:
        """Return the prompt of a chat. Refuse tools and calls of an unknown format, and reasoning options without effect."""
        assert chat.messages is not None
        if not chat.include_reasoning and self._reasoning_parser is None and THINK_START in self._template:
            allowed = "left out, as the server does not separate reasoning content from content"
            raise InvalidValueError("include_reasoning", False, allowed, "Launch it with --reasoning-parser.")
        messages: Sequence[Mapping[str, Any]] = chat.messages
        tools = None
        if chat.tools is not None:
            parser = self._parser_for_tools()
            if "tools" in self._template:
                tools = chat.tools.offered
            else:
                messages = describe_tools_in_system_prompt(messages, chat.tools.offered, parser)
        elif not self._template_has_calls:
            about_tools = (each.get("tool_calls") or each.get("role") == "tool" for each in messages)
            if (index := next((index for index, is_about in enumerate(about_tools) if is_about), None)) is not None:
                field = (f"messages[{index}]", "a call or its result")
                messages = render_calls_as_text(messages, self._parser_for_tools(*field), *field)
        return render_chat(
            self._tokenizer,
            messages,
            {**self._hints(chat), **chat.chat_template_kwargs},
            tools,
            chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            documents=chat.documents,
            chat_template=self._own_template,
            apply=None if self._own_template is None else render_in_child_process,
        )

    def _hints(self, chat: Tokenize) -> dict[str, Any]:
        """Return the hints that are variables of the template. Turning reasoning off is allowed for models without it."""
        hints = {name: value for name, value in chat.template_hints.items() if name in self._template}
        only_disables_reasoning = chat.template_hints.get("enable_thinking") is False
        has_no_effect = only_disables_reasoning and THINK_START not in self._template
        if chat.hints_name and not hints and not has_no_effect:
            allowed = f"left out, as the model's chat template has no variable {' or '.join(chat.template_hints)}"
            raise InvalidValueError(chat.hints_name, chat.template_hints["reasoning_effort"], allowed)
        return hints

    def parser(self, chat: Tokenize, prompt: str, grammar: GrammarSource | None = None) -> ChatOutputParser | None:
        """Return the parser of the output, or None if all of it is content. `grammar` is the grammar of the output."""
        splitter: ReasoningSplitter | HarmonySplitter | None = None
        tools = None
        if chat.tools is not None:
            parser = self._parser_for_tools()
            strict: Collection[str] = chat.tools.strict_names if _has_strict_calls(chat) else ()
            if issubclass(parser, TaggedToolParser) and (strict or grammar is not None):
                strict = parser.constrained_names(chat.tools.parameters, strict)
            tools = parser(chat.tools.parameters, chat.tools.parallel, strict)
        if isinstance(tools, HarmonyToolParser):
            splitter = HarmonySplitter(tools)
        elif self._reasoning_parser == HARMONY and chat.separate_reasoning:
            splitter = HarmonySplitter()
        elif self._reasoning_parser is not None and chat.separate_reasoning:
            # An output that a grammar constrains from its first token on has no reasoning content.
            is_free = grammar is None or grammar.kind == "structural_tag" or _has_strict_calls(chat)
            is_constrained = grammar is not None and not is_free and grammar.reasoning_end_token is None
            splitter = ReasoningSplitter(False if is_constrained else self._begins_with_reasoning(chat, prompt))
        return None if splitter is None and tools is None else ChatOutputParser(splitter, tools, chat.include_reasoning)

    def _begins_with_reasoning(self, chat: Tokenize, prompt: str) -> bool | None:
        """Return True if the output begins with reasoning content; see `starts_with_reasoning`."""
        assert self._reasoning_parser is not None
        if chat.continue_final_message and chat.messages:
            content = plain_messages(chat.messages[-1:])[0]["content"]
            if content.strip():
                return bool(content.rfind(THINK_START) > content.rfind(THINK_END))
        return starts_with_reasoning(self._reasoning_parser, prompt)

    def needs_special_tokens(self, chat: Tokenize) -> bool:
        """Return True if a tag of reasoning or tool calls is a special token, which detokenization skips by default.

        With a reasoning parser, this holds even if the request has ``separate_reasoning=false``: the tags then stay in the
        content, so that the client can separate it.
        """
        tags = set() if self._reasoning_parser is None else {THINK_START, THINK_END, *HARMONY_TAGS}
        if chat.tools is not None:
            parser = self._parser_for_tools()
            tags |= {*HARMONY_TAGS} if parser is HarmonyToolParser else {parser.begin, parser.end, *parser.inner_tags}
        return bool(tags & self._special_tokens)

    def grammar(self, chat: Tokenize, prompt: str) -> GrammarSource | None:
        """Return the grammar of the output, or None if nothing constrains it. Reasoning content is never constrained.

        The grammar allows structured output, or tool calls, or a choice of the two, or the free text of `strict_grammar`.
        """
        structured = chat.sampling.structured_outputs
        source = structured.source(chat.grammar_name) if structured is not None else None
        if chat.tools is not None and self._tool_parser is HarmonyToolParser:
            refuse_constraints(chat.tools, source)
        elif chat.tools is not None and _has_strict_calls(chat):
            return strict_grammar(self._parser_for_tools(), chat.tools)  # it leaves reasoning content free by itself
        elif chat.tools is not None and (chat.tools.is_required or source is not None):
            # As with OpenAI and in vLLM, structured output has no effect on an output that must be calls.
            source = required_grammar(self._parser_for_tools(), chat.tools, None if chat.tools.is_required else source)
        if source is None or self._reasoning_parser in (None, HARMONY):
            return source
        has_begun, end = self._begins_with_reasoning(chat, prompt), self._token(THINK_END)
        if has_begun is False or end is None:
            return source
        begin = None if has_begun else self._token(THINK_START)
        return msgspec.structs.replace(source, reasoning_end_token=end, reasoning_begin_token=begin)

    def _token(self, tag: str) -> int | None:
        """Return the token id of a tag, or None if it is not a single token."""
        token: int = self._tokenizer.convert_tokens_to_ids(tag)
        return token if self._tokenizer.decode([token]) == tag else None

    def _parser_for_tools(self, name: str = "tools", value: str = "given") -> type[ToolParser]:
        if self._tool_parser is None:
            allowed = "left out: the format of the model's tool calls cannot be detected from its chat template"
            shows = "tools" in self._template if name == "tools" else self._template_has_calls
            formats = [each for each, parser in TOOL_PARSERS.items() if shows or parser.is_json]
            raise InvalidValueError(name, value, allowed, f"Launch with --tool-call-parser {' or '.join(formats)}.")
        return self._tool_parser


def _has_strict_calls(chat: Tokenize) -> bool:
    """Return True if the output is free text in which a grammar constrains the calls of strict functions."""
    tools, structured = chat.tools, chat.sampling.structured_outputs
    return tools is not None and bool(tools.strict_names) and not tools.is_required and structured is None
