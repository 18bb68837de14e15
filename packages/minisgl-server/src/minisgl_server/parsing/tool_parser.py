"""Parses tool calls in the text of a model: JSON, as with Hermes and Qwen, Llama 3 and Mistral, or messages of gpt-oss."""

import json
import re
import uuid
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, ClassVar

from pydantic_core import from_json

from minisgl_core.protocol.messages import ToolCallDelta
from minisgl_core.text.stop import StopFinder
from minisgl_server.parsing.json_scanner import JsonScanner

_NAME = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""Start of a tool call up to its arguments, in the order that models are trained to write."""


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid, has half of a surrogate pair, or is nested too deeply."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


class ToolParser:
    """Splits a stream of text into content and tool calls.

    Text that turns out not to be a call is content, unchanged. Whitespace around calls is dropped. Text is held back as long
    as it could begin a call.

    Attributes:
        num_calls: number of calls so far.
        is_done: True once the one allowed call has ended, so that the output ends here.
    """

    begin: ClassVar[str]
    """Tag before each call, or before the first."""
    other_begins: ClassVar[tuple[str, ...]] = ()
    """Other texts that models write before a call."""
    end: ClassVar[str] = ""
    """Tag after each call."""
    inner_tags: ClassVar[tuple[str, ...]] = ()
    """Other tags of this format."""
    is_json: ClassVar[bool] = True
    """True if a call is a JSON object with its name and its arguments, which models write without knowing it from a template."""
    bare_start: ClassVar[bool] = False
    """True if an object at the start of the text is a call without a tag, if it names one of the tools."""
    separators: ClassVar[str] = ""
    """Characters that may separate calls that share one tag."""
    call_id_format: ClassVar[str] = "call_{:.24}"
    """Format of call ids, of a text with 32 hexadecimal digits."""
    arguments_key: ClassVar[str] = "arguments"
    """Key of the arguments in this format."""
    call_delimiters: ClassVar[tuple[str, str, str]] = ("", "", "\n")
    """Texts before, after and between tool calls, for the grammar of an output that must be calls, and for prompts."""
    structural_tags: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """Structural tags of calls in otherwise free text: trigger, text before the arguments, and text after them.

    NAME stands for the function's name. A tag whose trigger is `begin` constrains calls of all functions, the others only those
    of strict functions.
    """

    def __init__(self, functions: Mapping[str, Any], parallel: bool, strict: Collection[str] = ()) -> None:
        """Start to parse one output.

        Args:
            functions: JSON schemas of the parameters, or None, by the names of the tools.
            parallel: False ends the output after the first call.
            strict: names of the functions whose calls a grammar constrains. A call of one must begin as `structural_tags` say,
                because the grammar constrains no others; otherwise, it is content.
        """
        self._functions, self._parallel, self._strict = functions, parallel, strict
        prefixes = [begin.removeprefix(self.begin).lstrip("[ \n") for _, begin, _ in self.structural_tags]
        self._prefixes = {name: frozenset(prefix.replace("NAME", name) for prefix in prefixes) for name in strict}
        self._space: list[str] = []
        """Whitespace that is held back."""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self.num_calls = 0
        self.is_done = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str, finished: bool) -> tuple[str, list[ToolCallDelta]]:
        """Add text; return new content and new parts of calls. With `finished`, nothing is held back."""
        for char in (*text, "") if finished else text:
            if not self.is_done:
                self._reading.send(char)
        self._flush_arguments()
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return content, calls

    # Each generator receives a character per `yield`, and an empty text at the end.

    def _read(self) -> Generator[None, str, None]:
        finder = StopFinder((self.begin, *self.other_begins))
        text = yield
        if self.bare_start:
            while text.isspace():
                self._show(text)
                text = yield
            if text == "{":
                text = yield from self._read_calls("", text, self._functions)
        while text:
            shown, tag = finder.push(text)
            self._show(shown)
            text = yield
            if tag is not None:
                text = yield from self._read_calls(tag, text, None)
        self._show(finder.finish())
        if self.num_calls == 0:
            self._flush_space()
        yield

    def _read_calls(self, tag: str, char: str, known: Collection[str] | None) -> Generator[None, str, str]:
        """Read calls that share one tag. Return the text to go on with: what was read after them, or the next character.

        `tag` is the text before the first call, and `char` the call's first character. `known` has the names that the first call
        may have; with None, it may have any.
        """
        while True:
            text = yield from self._read_call(tag, char, known)
            if text is not None:
                return text
            text = yield from self._read_after()
            if not self.separators or not text.endswith("{"):
                return text
            tag, char, known = text[:-1], "{", None

    def _read_call(self, tag: str, char: str, known: Collection[str] | None) -> Generator[None, str, str | None]:
        """Read a call, a JSON object. Return None if it is complete, and else the text to go on with.

        Once the name is known, arguments are passed on as they come. The JSON breaks off at a "<" that is not in a string.
        """
        scanner, chars = JsonScanner(), list[str]()
        has_name = in_arguments = is_nested = False
        while char and (char != "<" or scanner.in_string):
            if scanner.depth == 0 and char != "{" and not char.isspace():
                self._add(tag + "".join(chars) + char)
                return (yield)
            scanner.push(char)
            if scanner.depth == 2 and not is_nested:
                is_nested = True  # this bracket begins the arguments, if the keys have the usual order
                before = "".join(chars)
                name: Any = _loads(match[1]) if char == "{" and (match := _NAME.fullmatch(before)) else None
                if self._may_call(name, before, known):
                    has_name = in_arguments = True
                    self._add_call(name)
            if in_arguments:
                self._arguments.append(char)
                in_arguments = scanner.depth > 1
            elif not has_name:
                chars.append(char)
            if char in "}]" and scanner.depth == 0:
                if not has_name and not self._add_reordered_call("".join(chars), known):
                    self._add(tag + "".join(chars))
                    return (yield)
                self._flush_arguments()
                self.is_done = not self._parallel
                return None
            char = yield
        self._flush_arguments()
        if not has_name:
            self._add(tag + "".join(chars))
            return char
        if not char:
            return ""
        # Read up to the end tag. If the JSON broke off in the arguments, the text belongs to them.
        emit: Callable[[str], object] = self._arguments.append if in_arguments else str
        tag_after = yield from self._read_to((self.end,) if self.end else (), emit, char)
        self._flush_arguments()
        self.is_done = tag_after is not None and not self._parallel
        return (yield) if tag_after is not None else ""

    def _add_reordered_call(self, text: str, known: Collection[str] | None) -> bool:
        """Add a complete call whose keys have another order than usual. Return False if the text is no such call."""
        call = _loads(text)
        name: Any = call.get("name") if isinstance(call, dict) else None
        if not self._may_call(name, "", known):
            return False
        value = call.get("arguments", call.get("parameters"))
        arguments = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not isinstance(_loads(arguments), dict):
            return False
        self._add_call(name)
        self._arguments.append(arguments)
        return True

    def _may_call(self, name: Any, prefix: str, known: Collection[str] | None) -> bool:
        """Return True if `prefix`, the text before the arguments, may begin a call of one of `known`, or of any if it is None."""
        is_known = isinstance(name, str) and (known is None or name in known)
        return is_known and (name not in self._prefixes or prefix.lstrip() in self._prefixes[name])

    def _read_after(self) -> Generator[None, str, str]:
        """Read the text after a call: whitespace, and its end tag or separators. Return the text if it is something else."""
        text = ""
        while char := (yield):
            if not text and char.isspace():
                continue
            text += char
            if text == self.end:
                return (yield)
            is_separator = self.separators and char in f"{self.separators} \n\t\r"
            if not is_separator and not self.end.startswith(text):
                return text
        if not self.end.startswith(text):  # an output that was cut may end in the end tag
            self._show(text)
        return ""

    @staticmethod
    def _read_to(
        tags: tuple[str, ...],
        emit: Callable[[str], object],
        char: str | None = None,
        scanner: JsonScanner | None = None,
        *,
        emits_cut_tag: bool = True,
    ) -> Generator[None, str, str | None]:
        """Emit text up to one of the tags, from `char` on if that was read. Return the tag, or None at the end of the output.

        With a scanner, the text is JSON, and tags in its strings do not count. `emits_cut_tag` is for an output that is cut in a
        tag.
        """
        finder = StopFinder(tags)
        while char := (yield) if char is None else char:
            shown, tag = finder.push(char) if scanner is None or not scanner.in_string else (char, None)
            if scanner is not None:
                scanner.push(char)
            emit(shown)
            if tag is not None:
                return tag
            char = None
        rest = finder.finish()
        if emits_cut_tag:
            emit(rest)
        return None

    def _add_call(self, name: str, call_id: str | None = None) -> None:
        """Add a new call, with a random id if none is given."""
        self._space = []
        call_id = call_id or self.call_id_format.format(uuid.uuid4().hex)
        self._calls.append(ToolCallDelta(index=self.num_calls, id=call_id, name=name, arguments=""))
        self.num_calls += 1

    def _flush_arguments(self) -> None:
        arguments = "".join(self._arguments)
        self._arguments.clear()  # also of empty texts, or each push would take longer than the last
        if arguments:
            if not self._calls:
                self._calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=""))
            self._calls[-1].arguments += arguments

    def _show(self, text: str) -> None:
        """Add content. Whitespace is held back, as it is dropped before a call."""
        shown = text.rstrip()
        if shown:
            self._add(shown)
        self._space.append(text[len(shown) :])

    def _add(self, text: str) -> None:
        self._flush_space()
        self._content.append(text)

    def _flush_space(self) -> None:
        self._content += self._space
        self._space = []


class HermesParser(ToolParser):
    """Format ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of Hermes 2 Pro, Qwen 2.5 and Qwen 3."""

    begin = "<tool_call>"
    end = "</tool_call>"
    call_delimiters = ("<tool_call>\n", "\n</tool_call>", "\n")
    structural_tags = (("<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),)


class Llama3JsonParser(ToolParser):
    """Format ``{"name": ..., "parameters": {...}}`` of Llama 3.1 and later; semicolons separate several calls."""

    begin = "<|python_tag|>"
    bare_start = True
    separators = ";,"
    arguments_key = "parameters"
    call_delimiters = ("", "", "; ")
    structural_tags = (
        ("<|python_tag|>", '<|python_tag|>{"name": "NAME", "parameters": ', "}"),
        ('{"name": "NAME"', '{"name": "NAME", "parameters": ', "}"),
        ('{"type": "function", "name": "NAME"', '{"type": "function", "name": "NAME", "parameters": ', "}"),
    )


class MistralParser(ToolParser):
    """Format ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`` of Mistral 7B v0.3, Nemo, Large 2 and others.

    Their chat templates render only call ids of nine letters and digits.
    """

    begin = "[TOOL_CALLS]"
    end = "]"
    separators = ","
    call_id_format = "{:.9}"
    call_delimiters = ("[TOOL_CALLS] [", "]", "")
    structural_tags = (("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "NAME", "arguments": ', "}]"),)

    def _read_calls(self, tag: str, char: str, known: Collection[str] | None) -> Generator[None, str, str]:
        """Read the start of the list, and then its calls."""
        space = []
        while char.isspace():
            space.append(char)
            char = yield
        tag += "".join(space)
        if char == "[":
            char = yield
            if char and char != "{" and not char.isspace():  # perhaps another tag, which has the bracket
                self._add(tag)
                return f"[{char}"
            tag += "["
        return (yield from super()._read_calls(tag, char, known))


class HarmonyToolParser(ToolParser):
    """Calls in the harmony format of gpt-oss, which `HarmonySplitter` finds by their recipients. All text is content."""

    begin = "<|call|>"
    is_json = False

    def begin_call(self, name: str) -> None:
        self._flush_arguments()
        self._add_call(name)

    def add_arguments(self, text: str) -> None:
        self._arguments.append(text)

    def end_call(self) -> None:
        self.is_done = not self._parallel

    def push(self, text: str, finished: bool) -> tuple[str, list[ToolCallDelta]]:
        """Return the text, and the parts of calls since the last push."""
        self._flush_arguments()
        calls, self._calls = self._calls, []
        return text, calls
