"""Parses tool calls whose function names are between tags, and not in JSON: those of Qwen3-Coder, GLM, Mistral and Kimi."""

import re
from collections.abc import Callable, Collection, Generator, Mapping
from functools import cache, cached_property
from itertools import count
from typing import Any, ClassVar

from minisgl_core.text.stop import StopFinder
from minisgl_server.parsing.argument_values import OBJECT, STRING, argument_types, quoted, to_json
from minisgl_server.parsing.tool_call_reader import JsonScanner
from minisgl_server.parsing.tool_parser import ToolParser

_SPACE = r"\s{0,16}"
_NAME = r"(?P<name>[\w.-]{1,64})"


def _partial(text: str, then: str = "") -> str:
    """Return a pattern that matches every prefix of a text. After the whole text, it matches `then`."""
    for char in reversed(text):
        then = f"(?:{re.escape(char)}{then})?"
    return then


class TaggedToolParser(ToolParser):
    """Format of calls that start with a header: tags around the function's name."""

    is_json = False
    header: ClassVar[re.Pattern[str]]
    """Matches a header, from the tag before the call, and all prefixes of it, so that a stream can be held back.

    Its length is bounded, because each further character is matched with all of those before.
    """
    header_ends: ClassVar[tuple[str, ...]]
    """Texts that end a header."""
    unsafe_begins: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call only if the name is that of a tool, as other text may have them."""
    call_ends: ClassVar[tuple[str, ...]] = ()
    """Tags after the arguments. A header that ends with one begins a call only if the name is that of a tool."""

    def _read_calls(self, tag: str, char: str, known: Collection[str] | None) -> Generator[None, str, str]:
        """Read a header and the call."""
        text = tag
        while char and (match := self.header.fullmatch(text + char)):
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

    def _read_body(self, header: str, end: str, match: re.Match[str]) -> Generator[None, str, str]:
        """Read the call after a header, whose last tag and match are given. Return the text to go on with."""
        self._add_call(match["name"], match.groupdict().get("id"))
        following = yield from self._read_arguments(match["name"], end)
        self._flush_arguments()
        return following

    def _read_arguments(self, name: str, tag: str) -> Generator[None, str, str]:
        """Read the arguments after a header, whose last tag is given. Return the text to go on with."""
        return (yield from self._end_call((yield from self._read_to(self._ends, self._arguments.append))))

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

    @staticmethod
    def _read_to(
        tags: tuple[str, ...], emit: Callable[[str], object], char: str | None = None
    ) -> Generator[None, str, str | None]:
        """Emit text up to one of the tags, from `char` on if that was read. Return the tag, or None at the end of the output."""
        finder = StopFinder(tags)
        while char := (yield) if char is None else char:
            shown, tag = finder.push(char)
            emit(shown)
            if tag is not None:
                return tag
            char = None
        emit(finder.finish())
        return None


class XmlToolParser(TaggedToolParser):
    """Format in which tags surround the name and the value of each argument. Values become JSON as the schema asks.

    Arguments that can only be strings are passed on as they come, and others when they are complete.
    """

    parameter: ClassVar[str]
    """Tag before the name of an argument."""
    key_end: ClassVar[str]
    """Tag after the name of an argument."""
    value_begin: ClassVar[str] = ""
    """Tag before a value, if another tag ends the name."""
    value_ends: ClassVar[tuple[str, ...]]
    """Texts that end a value. Some may end with the tag after the value, in case that its own is missing."""

    @cached_property
    def _types(self) -> Callable[[str, str], frozenset[str]]:
        """Function that returns the types of a function's argument. It reads each schema once."""
        return cache(lambda function, argument: argument_types(self._functions.get(function), argument))

    def _read_arguments(self, name: str, tag: str | None) -> Generator[None, str, str]:
        self._arguments.append("{")
        separator = ""
        ends = (self.parameter, *self._ends)
        while tag == self.parameter:
            key: list[str] = []
            tag = yield from self._read_to((self.key_end, *ends), key.append)
            if tag == self.key_end and self.value_begin:
                tag = yield from self._read_to((self.value_begin, *ends), str)
            if tag in (self.key_end, self.value_begin):
                argument = "".join(key).strip()
                tag = yield from self._read_value(f"{separator}{quoted(argument)}: ", self._types(name, argument))
                separator = ", "
            if tag is not None:
                tag = next(filter(tag.endswith, ends), None) or (yield from self._read_to(ends, str))
        if tag is not None:
            self._arguments.append("}")
        return (yield from self._end_call(tag))

    def _read_value(self, key: str, types: frozenset[str]) -> Generator[None, str, str | None]:
        """Read a value and emit it after its key. Return its end tag, or None if the output ends before it."""
        char = yield
        if char == "\n" and "\n" in self.value_ends[0]:
            char = yield
        if types == STRING:
            self._arguments.append(f'{key}"')
            tag = yield from self._read_to(
                self.value_ends, lambda text: self._arguments.append(quoted(text)[1:-1]), char
            )
            self._arguments += '"' if tag is not None else ""
            return tag
        value: list[str] = []
        tag = yield from self._read_to(self.value_ends, value.append, char)
        if tag is not None:
            self._arguments.append(key + to_json("".join(value), types))
        return tag


class Qwen3CoderParser(XmlToolParser):
    r"""Format ``<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>``.

    Qwen3-Coder and later models of Qwen have it. Models sometimes leave out the first tag.
    """

    begin = "<tool_call>"
    other_begins = unsafe_begins = ("<function=",)
    end = "</tool_call>"
    parameter = "<parameter="
    key_end = ">"
    value_ends = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>\n</tool_call>")
    call_ends = ("</function>", "</tool_call>")
    header_ends = ("<parameter=", "</function>")
    header = re.compile(
        rf"(?:<tool_call>{_SPACE})?"
        + _partial(
            "<function=",
            f"(?:{_NAME}{_partial('>', _SPACE + '(?:' + '|'.join(map(_partial, header_ends)) + ')')})?",
        )
    )


class Glm45Parser(XmlToolParser):
    r"""Format ``<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>`` of GLM-4.5 and later."""

    begin = "<tool_call>"
    end = "</tool_call>"
    parameter = "<arg_key>"
    key_end = "</arg_key>"
    value_begin = "<arg_value>"
    value_ends = ("</arg_value>",)
    call_ends = ("</tool_call>",)
    inner_tags = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    header_ends = ("<arg_key>", "</tool_call>")
    header = re.compile(f"<tool_call>{_SPACE}(?:{_NAME}{_SPACE}(?:{'|'.join(map(_partial, header_ends))}))?")


_ARGUMENTS = _partial("[ARGS]", rf"{_SPACE}\{{?") + r"\{?"


class MistralV11Parser(TaggedToolParser):
    """Format ``[TOOL_CALLS]NAME[ARGS]{...}`` of Mistral's tokenizers since version 11, such as those of Small 3.2 and Devstral.

    ``[CALL_ID]ID`` may follow the name. As with `MistralParser`, chat templates render only call ids of nine letters and digits.
    """

    begin = "[TOOL_CALLS]"
    inner_tags = ("[CALL_ID]", "[ARGS]")
    call_id_format = "{:.9}"
    header_ends = ("{",)
    header = re.compile(
        rf"{re.escape(begin)}{_SPACE}(?:{_NAME}(?:{_partial('[CALL_ID]', rf'[a-zA-Z0-9]{{0,64}}{_ARGUMENTS}')}|{_ARGUMENTS}))?"
    )

    def _read_body(self, header: str, end: str, match: re.Match[str]) -> Generator[None, str, str]:
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
    inner_tags = (*other_begins, *header_ends, *call_ends)
    header = re.compile(
        rf"(?:{re.escape(begin)}{_SPACE})?"
        + _partial(
            "<|tool_call_begin|>",
            rf"{_SPACE}(?:(?P<id>(?:functions\.)?{_NAME}(?::\d{{0,8}})?){_SPACE}{_partial(header_ends[0])})?",
        )
    )

    def __init__(self, functions: Mapping[str, Any], parallel: bool, strict: Collection[str] = ()) -> None:
        """Start to parse one output."""
        super().__init__(functions, parallel, strict)
        self._call_ids: set[str] = set()
        self._indices = count()

    def _add_call(self, name: str, call_id: str | None = None) -> None:
        while call_id is None or call_id in self._call_ids:
            call_id = f"functions.{name}:{next(self._indices)}"
        self._call_ids.add(call_id)
        super()._add_call(name, call_id)
