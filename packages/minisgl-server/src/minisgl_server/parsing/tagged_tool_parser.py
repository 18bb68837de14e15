"""Parses tool calls whose function names are between tags, and whose arguments are JSON: of Mistral, Kimi and DeepSeek."""

from collections.abc import Callable, Collection, Generator, Mapping
from itertools import count
from typing import Any, ClassVar

import regex

from minisgl_core.contracts.grammar import CallPart
from minisgl_server.parsing.argument_values import OBJECT, to_json
from minisgl_server.parsing.grammar_size import GrammarSize
from minisgl_server.parsing.json_scanner import JsonScanner
from minisgl_server.parsing.tool_parser import ToolParser

SPACE = r"\s{0,16}"
NAME = r"(?P<name>[\w.-]{1,64})"


class TaggedToolParser(ToolParser):
    """Format of calls that start with a header: tags around the function's name."""

    is_json = False
    header: ClassVar[regex.Pattern[str]]
    """Matches a header, from the tag before the call. Its length is bounded, because it is matched again with each character."""
    header_ends: ClassVar[tuple[str, ...]]
    """Texts that end a header."""
    unsafe_begins: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call only if the name is that of a tool, as other text may have them."""
    call_ends: ClassVar[tuple[str, ...]] = ()
    """Tags after the arguments. A header that ends with one begins a call only if the name is that of a tool."""
    trigger: ClassVar[str]
    """Text in a call from which on a grammar constrains it. NAME stands for the function's name."""
    call_begin: ClassVar[str]
    """Text between the trigger and JSON arguments, with NAME for the function's name."""
    section: ClassVar[tuple[str, str]] = ("", "")
    """Texts around all calls, for the grammar of an output that must be calls."""
    has_json_arguments: ClassVar[bool] = True
    """True if the arguments are a JSON object."""

    @classmethod
    def call(cls, name: str, schema: Mapping[str, Any], size: GrammarSize) -> list[CallPart]:
        """Return the parts of a call after its trigger, for a grammar.

        Args:
            name: name of the function.
            schema: schema of the arguments.
            size: size of the grammar of the request so far, to which this adds that of the arguments.

        Raises:
            UnsupportedSchemaError: the grammar cannot enforce the schema, or is too large.
        """
        size.add(schema)
        return [*cls.before_arguments(name), {"schema": schema}, *cls.call_ends[:1]]

    @classmethod
    def before_arguments(cls, name: str) -> list[CallPart]:
        """Return the parts between the trigger and JSON arguments, for a grammar."""
        return [cls.call_begin.replace("NAME", name)]

    @classmethod
    def free_call(cls, name: str) -> list[CallPart]:
        """Return the parts of a call with any arguments after its trigger, for a grammar."""
        return cls.call(name, {"type": "object"}, GrammarSize())

    @classmethod
    def constrained_names(cls, names: Collection[str], strict: Collection[str]) -> Collection[str]:
        """Return the names of the functions whose arguments a grammar constrains.

        Args:
            names: all names.
            strict: names of the strict functions if the other calls are free; empty if the output must be calls.
        """
        # After a trigger without a name, the grammar also lists the other calls, whose arguments are any JSON object.
        lists_all = cls.has_json_arguments and "NAME" not in cls.trigger
        return names if lists_all or not strict else strict

    def _read_calls(self, tag: str, char: str, known: Collection[str] | None) -> Generator[None, str, str]:
        text = tag
        while char and (match := self.header.fullmatch(text + char, partial=True)):
            text += char
            if text.endswith(self.header_ends):
                end = next(each for each in self.header_ends if text.endswith(each))
                if match["name"] not in self._functions and (tag in self.unsafe_begins or end in self.call_ends):
                    self._add(text)
                    return (yield)
                return (yield from self._read_body(text, end, match))
            char = yield
        text += char
        start = text.rfind(self.begin[0])  # the end of what is no header may begin a tag
        if char and start > 0 and any(begin.startswith(text[start:]) for begin in (self.begin, *self.other_begins)):
            self._add(text[:start])
            return text[start:]
        self._add(text)
        return (yield) if char else ""

    def _read_body(self, header: str, end: str, match: regex.Match[str]) -> Generator[None, str, str]:
        """Read the call after a header, whose last tag and match are given. Return the text to go on with."""
        self._add_call(match["name"], match.groupdict().get("id"))
        following = yield from self._read_arguments(match["name"], end)
        self._flush_arguments()
        return following

    def _read_arguments(self, name: str, tag: str) -> Generator[None, str, str]:
        """Read the arguments after a header, whose last tag is given. Return the text to go on with."""
        scanner = JsonScanner() if name in self._strict else None
        emit = self._arguments.append
        tag_after = yield from self._read_to(self._ends, emit, None, scanner, emits_cut_tag=False)
        return (yield from self._end_call(tag_after))

    @property
    def _ends(self) -> tuple[str, ...]:
        """Tags that end a call: those after it, and those before the next one in case that they are missing."""
        return (*self.call_ends, self.end, self.begin, *self.other_begins)

    def _end_call(self, tag: str | None) -> Generator[None, str, str]:
        """End a call at one of `_ends`, or at the end of the output. Return the text to go on with."""
        if tag is None:
            return ""
        self.is_done = not self._parallel
        if tag in (self.begin, *self.other_begins):
            return tag
        return (yield) if tag == self.end else (yield from self._read_after())


class MistralV11Parser(TaggedToolParser):
    """Format ``[TOOL_CALLS]NAME[ARGS]{...}`` of Mistral's tokenizers since version 11, such as those of Small 3.2 and Devstral.

    ``[CALL_ID]ID`` may follow the name. As with `MistralParser`, chat templates render only call ids of nine letters and digits.
    """

    begin = "[TOOL_CALLS]"
    inner_tags = ("[CALL_ID]", "[ARGS]")
    call_id_format = "{:.9}"
    header_ends = ("{",)
    trigger = begin
    call_delimiters = ("", "", "")
    header = regex.compile(rf"\[TOOL_CALLS\]{SPACE}{NAME}(?:\[CALL_ID\][a-zA-Z0-9]{{0,64}})?(?:\[ARGS\]{SPACE})?\{{")

    @classmethod
    def before_arguments(cls, name: str) -> list[CallPart]:
        call_id: CallPart = {"patterns": ["[a-zA-Z0-9]{9}"], "excludes": [], "end": "[ARGS]"}
        return [name, {"any_of": [["[ARGS]"], ["[CALL_ID]", call_id]]}]

    def _read_body(self, header: str, end: str, match: regex.Match[str]) -> Generator[None, str, str]:
        """Read the call. If no tool has its name, it is held back until its arguments are known to be an object."""
        if match["name"] in self._functions:
            return (yield from super()._read_body(header, end, match))
        chars: list[str] = []
        is_complete = yield from self._read_object(end, chars.append)
        arguments = "".join(chars)
        if is_complete and to_json(arguments, OBJECT) == arguments:
            self._add_call(match["name"])
            self._arguments.append(arguments)
            self._flush_arguments()
            self.is_done = not self._parallel
        else:
            self._add(header.removesuffix(end) + arguments)
        return (yield) if is_complete else ""

    def _read_arguments(self, name: str, tag: str) -> Generator[None, str, str]:
        is_complete = yield from self._read_object(tag, self._arguments.append)
        self.is_done = is_complete and not self._parallel
        return (yield) if is_complete else ""

    @staticmethod
    def _read_object(char: str, emit: Callable[[str], object]) -> Generator[None, str, bool]:
        """Emit an object from its first character on. Return False if the output ends before it."""
        scanner = JsonScanner()
        while char:
            scanner.push(char)
            emit(char)
            if scanner.depth == 0:
                return True
            char = yield
        return False


class KimiK2Parser(TaggedToolParser):
    """Format ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` of Kimi K2.

    Tags surround a section of calls. The call ids are those of the model, because its chat template shows them as names. An id
    that repeats gets the next free index.
    """

    begin = "<|tool_calls_section_begin|>"
    other_begins = ("<|tool_call_begin|>",)
    end = "<|tool_calls_section_end|>"
    call_ends = ("<|tool_call_end|>",)
    header_ends = ("<|tool_call_argument_begin|>",)
    trigger = "<|tool_call_begin|>"
    call_delimiters = ("", "", "")
    section = (begin, end)
    inner_tags = (*other_begins, *header_ends, *call_ends)
    header = regex.compile(
        rf"(?:<\|tool_calls_section_begin\|>{SPACE})?<\|tool_call_begin\|>{SPACE}"
        rf"(?P<id>(?:functions\.)?{NAME}(?::\d{{0,8}})?){SPACE}<\|tool_call_argument_begin\|>"
    )

    @classmethod
    def before_arguments(cls, name: str) -> list[CallPart]:
        return [f"functions.{name}:", {"patterns": [r"\d{1,8}"], "excludes": [], "end": cls.header_ends[0]}]

    def __init__(self, functions: Mapping[str, Any], parallel: bool, strict: Collection[str] = ()) -> None:
        super().__init__(functions, parallel, strict)
        self._call_ids: set[str] = set()
        self._indices = count()

    def _add_call(self, name: str, call_id: str | None = None) -> None:
        while call_id is None or call_id in self._call_ids:
            call_id = f"functions.{name}:{next(self._indices)}"
        self._call_ids.add(call_id)
        super()._add_call(name, call_id)


_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"


class DeepSeekV31Parser(TaggedToolParser):
    """Format ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` of DeepSeek-V3.1. Tags surround all calls."""

    begin = "<｜tool▁calls▁begin｜>"
    other_begins = (_DEEPSEEK_CALL,)
    end = "<｜tool▁calls▁end｜>"
    call_ends: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁end｜>",)
    header_ends: ClassVar[tuple[str, ...]] = (_DEEPSEEK_SEPARATOR,)
    trigger = _DEEPSEEK_CALL
    call_begin = f"NAME{_DEEPSEEK_SEPARATOR}"
    call_delimiters = ("", "", "")
    section = (begin, end)
    inner_tags = (_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, "<｜tool▁call▁end｜>")
    header = regex.compile(rf"(?:{begin}{SPACE})?{_DEEPSEEK_CALL}{SPACE}{NAME}{SPACE}{_DEEPSEEK_SEPARATOR}")


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Format of DeepSeek-V3 and R1: ``function<｜tool▁sep｜>NAME`` and the arguments as a code block, between the same tags."""

    call_ends = ("\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>")
    header_ends = ("```json\n",)
    call_begin = f"function{_DEEPSEEK_SEPARATOR}NAME\n```json\n"
    call_delimiters = ("", "", "\n")
    header = regex.compile(
        rf"(?:{DeepSeekV31Parser.begin}{SPACE})?{_DEEPSEEK_CALL}{SPACE}function{_DEEPSEEK_SEPARATOR}"
        rf"{SPACE}{NAME}{SPACE}```json\n"
    )
