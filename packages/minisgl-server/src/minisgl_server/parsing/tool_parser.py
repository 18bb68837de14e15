"""Parses tool calls in the text of a model, in the formats of Hermes and Qwen, and of Llama 3."""

import uuid
from collections.abc import Collection
from typing import ClassVar

from minisgl_core.protocol.messages import ToolCallDelta
from minisgl_core.text.stop import StopFinder
from minisgl_server.parsing.tool_call_reader import ToolCallReader


class ToolParser:
    """Splits a stream of text into content and tool calls.

    Text that turns out not to be a call is content, unchanged. Whitespace around calls is dropped. Text is held back as long
    as it could begin a call.

    Attributes:
        num_calls: number of calls so far.
    """

    begin: ClassVar[str]
    """Tag before each call, or before the first."""
    end: ClassVar[str] = ""
    """Tag after each call."""
    bare_start: ClassVar[bool] = False
    """True if an object at the start of the text is a call without a tag, if it names one of the tools."""
    separators: ClassVar[str] = ""
    """Characters that may separate calls that share one tag."""
    arguments_key: ClassVar[str]
    """Key of the arguments in this format."""
    call_delimiters: ClassVar[tuple[str, str, str]]
    """Texts before, after and between tool calls, for the grammar of an output that must be calls, and for prompts."""
    structural_tags: ClassVar[tuple[tuple[str, str, str], ...]]
    """Structural tags of calls in otherwise free text: trigger, text before the arguments, and text after them.

    NAME stands for the function's name. A tag whose trigger is `begin` constrains calls of all functions, the others only those
    of strict functions.
    """

    def __init__(self, functions: Collection[str], parallel: bool, strict: Collection[str] = ()) -> None:
        """Start to parse one output.

        Args:
            functions: names of the tools.
            parallel: False ends the output after the first call.
            strict: names of the strict functions. A call of one must begin as `structural_tags` say, because the grammar
                constrains no others; otherwise, it is content.
        """
        self._functions, self._parallel = frozenset(functions), parallel
        prefixes = [begin.removeprefix(self.begin).lstrip() for _, begin, _ in self.structural_tags]
        self._prefixes = {name: frozenset(prefix.replace("NAME", name) for prefix in prefixes) for name in strict}
        self._finder = StopFinder((self.begin,))
        self._reader: ToolCallReader | None = None
        self._tag = ""
        """Text before the current call: its tag, a separator, or nothing."""
        self._after: list[str] | None = None
        """Characters since the last call, as long as it may be its end tag or lead to another call."""
        self._rest: StopFinder | None = None
        """Finds the end tag of a call whose JSON breaks off."""
        self._space: list[str] = []
        """Whitespace that is held back."""
        self._at_start = self.bare_start
        """True as long as a call without a tag may begin."""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self.num_calls = 0

    @property
    def is_done(self) -> bool:
        """True if the one allowed call has ended, so that the output ends here."""
        return not self._parallel and self.num_calls > 0 and self._reader is None

    def push(self, text: str, finished: bool) -> tuple[str, list[ToolCallDelta]]:
        """Add text; return new content and new parts of calls. With `finished`, nothing is held back."""
        for char in text:
            if not self.is_done:
                self._step(char)
        if finished and not self.is_done:
            self._end()
        self._flush_arguments()
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return content, calls

    def _step(self, char: str) -> None:
        if self._rest is not None:
            self._step_rest(char)
        elif self._reader is not None:
            self._step_call(char)
        elif self._after is not None:
            self._step_after(char)
        else:
            self._step_text(char)

    def _step_text(self, char: str) -> None:
        if self._at_start and not char.isspace():
            self._at_start = False
            if char == "{":
                self._start_call("", known_only=True)
                self._step_call(char)
                return
        shown, tag = self._finder.push(char)
        self._show(shown)
        if tag is not None:
            self._at_start = False
            self._finder = StopFinder((self.begin,))
            self._start_call(self.begin)

    def _step_call(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        is_new = reader.name is None
        reader.push(char)
        if is_new and reader.name is not None:
            self._add_call(reader.name)
        if reader.state == "open":
            return
        self._flush_arguments()
        if reader.state == "text":
            self._reader = None
            self._add(self._tag + reader.raw)
            if char == "<":
                self._step_text(char)
        elif reader.state == "complete":
            self._reader, self._after = None, []
        else:
            self._rest = StopFinder((self.end,) if self.end else ())
            self._step_rest(char)

    def _step_rest(self, char: str) -> None:
        """Read on where the JSON of a call broke off: text up to the end tag belongs to the arguments, unless they have ended."""
        assert self._rest is not None
        assert self._reader is not None
        shown, tag = self._rest.push(char)
        if self._reader.in_arguments:
            self._arguments.append(shown)
        if tag is not None:
            self._flush_arguments()
            self._rest = self._reader = None

    def _step_after(self, char: str) -> None:
        """Read the text after a call: whitespace, its end tag, or a separator before the next call."""
        after = self._after
        assert after is not None
        if not after and char.isspace():
            return
        after.append(char)
        if self.end and self.end.startswith("".join(after)):
            if len(after) == len(self.end):
                self._after, self._space = None, []
        elif self.separators and char == "{":
            self._after = None
            self._start_call("".join(after[:-1]))
            self._step_call(char)
        elif not self.separators or char not in f"{self.separators} \n\t\r":
            self._after = None  # neither an end tag nor a separator, so it is content
            for each in after:
                self._step_text(each)

    def _end(self) -> None:
        if self._rest is not None:
            if self._reader is not None and self._reader.in_arguments:
                self._arguments.append(self._rest.finish())
        elif self._reader is not None:
            if self._reader.name is None:
                self._add(self._tag + self._reader.raw)
        elif self._after is not None:
            self._show("".join(self._after))
        self._show(self._finder.finish())
        if self.num_calls == 0:
            self._flush_space()
        self._reader = self._after = self._rest = None

    def _start_call(self, tag: str, known_only: bool = False) -> None:
        self._tag = tag
        self._reader = ToolCallReader(self._functions if known_only else None, self._prefixes, self._arguments.append)

    def _add_call(self, name: str) -> None:
        """Add a new call."""
        self._space = []
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._calls.append(ToolCallDelta(index=self.num_calls, id=call_id, name=name, arguments=""))
        self.num_calls += 1

    def _flush_arguments(self) -> None:
        arguments = "".join(self._arguments)
        self._arguments.clear()
        if not arguments:
            return
        last = self._calls[-1] if self._calls else None
        if last is not None and last.index == self.num_calls - 1:
            last.arguments += arguments
        else:
            self._calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=arguments))

    def _show(self, text: str) -> None:
        """Add content. Whitespace is held back, as it is dropped before a call."""
        for char in text:
            if char.isspace():
                self._space.append(char)
            else:
                self._add(char)

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
    arguments_key = "arguments"
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


TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}
"""Parsers by the values of ``--tool-call-parser``."""


def detect_tool_parser(template: str) -> str | None:
    """Return the parser of the format that a chat template describes, or None if that is not clear."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template and '"parameters"' in template:
        return "llama3_json"
    return None
