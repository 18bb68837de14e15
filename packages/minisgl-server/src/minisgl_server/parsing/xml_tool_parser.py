"""Parses tool calls with tags around the name and the value of each argument: those of Qwen3-Coder and GLM."""

from collections.abc import Callable, Generator, Mapping
from functools import cache, cached_property
from typing import Any, ClassVar

import regex

from minisgl_core.contracts.grammar import CallPart
from minisgl_server.parsing.argument_values import STRING, argument_types, quoted, to_json
from minisgl_server.parsing.grammar_size import GrammarSize, UnsupportedSchemaError
from minisgl_server.parsing.json_scanner import JsonScanner
from minisgl_server.parsing.tagged_tool_parser import NAME, SPACE, TaggedToolParser
from minisgl_server.parsing.xml_arguments_grammar import ANY_TEXT, parameters_of, value_parts

_TYPE_BY_BRACKET = {"[": "array", "{": "object"}


class XmlToolParser(TaggedToolParser):
    """Format in which tags surround the name and the value of each argument. Values become JSON as the schema asks.

    Arguments that can only be strings are passed on as they come, and others when they are complete. In calls of the functions
    `strict`, values fit the grammar of `value_parts`: a tag in a string of a JSON value does not end it.
    """

    has_json_arguments = False

    parameter: ClassVar[str]
    """Tag before the name of an argument."""
    key_end: ClassVar[str]
    """Tag after the name of an argument."""
    value_begin: ClassVar[str] = ""
    """Tag before a value, if another tag ends the name."""
    value_ends: ClassVar[tuple[str, ...]]
    """Texts that end a value. Some may end with the tag after the value, in case that its own is missing."""

    @classmethod
    def parameters(cls, schema: Mapping[str, Any], key_end: str, space: str, size: GrammarSize) -> list[CallPart]:
        """Return the parts of arguments, for a grammar. They have the order of the schema.

        Args:
            schema: schema of the arguments.
            key_end: text between the name of an argument and its value.
            space: text after the tag after a value.
            size: size of the grammar of the request so far.
        """
        parts: list[CallPart] = []
        tags = (cls.key_end, cls.parameter, cls.begin, *cls.other_begins, cls.end, *cls.call_ends)
        for key, each, is_required in parameters_of(schema):
            if key != key.strip() or any(tag in key for tag in tags):
                raise UnsupportedSchemaError(f"{key!r} cannot be written as a name")
            begin, value = f"{cls.parameter}{key}{key_end}", value_parts(schema, key, each, cls.value_ends, size)
            size.add(begin)
            parts += [begin, *value, space] if is_required else [{"optional": [begin, *value, space]}]
        return parts

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
                key_text, types = f"{separator}{quoted(argument)}: ", self._types(name, argument)
                tag = yield from self._read_value(key_text, types, name in self._strict)
                separator = ", "
            if tag is not None:
                tag = next(filter(tag.endswith, ends), None) or (yield from self._read_to(ends, str))
        if tag is not None:
            self._arguments.append("}")
        return (yield from self._end_call(tag))

    def _read_value(self, key: str, types: frozenset[str], is_strict: bool) -> Generator[None, str, str | None]:
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
        is_json = is_strict and ("string" not in types or (char in ("[", "{") and _TYPE_BY_BRACKET[char] in types))
        scanner = JsonScanner() if is_json else None
        tag = yield from self._read_to(self.value_ends, value.append, char, scanner)
        if tag is not None:
            text = "".join(value)
            self._arguments.append(key + (text if is_json else to_json(text, types)))
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
    trigger = "<function=NAME>"
    call_delimiters = ("<tool_call>\n", "\n</tool_call>", "\n")
    header = regex.compile(rf"(?:<tool_call>{SPACE})?<function={NAME}>{SPACE}(?:<parameter=|</function>)")

    @classmethod
    def call(cls, name: str, schema: Mapping[str, Any], size: GrammarSize) -> list[CallPart]:
        return ["\n", *cls.parameters(schema, ">\n", "\n", size), "</function>"]


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
    trigger = "<tool_call>"
    call_delimiters = ("", "", "\n")
    header = regex.compile(f"<tool_call>{SPACE}{NAME}{SPACE}(?:<arg_key>|</tool_call>)")

    @classmethod
    def call(cls, name: str, schema: Mapping[str, Any], size: GrammarSize) -> list[CallPart]:
        return [f"{name}\n", *cls.parameters(schema, "</arg_key>\n<arg_value>", "\n", size), cls.end]

    @classmethod
    def free_call(cls, name: str) -> list[CallPart]:
        return [name, {"patterns": [rf"\n?(<{ANY_TEXT})?"], "excludes": [cls.begin, cls.end], "end": cls.end}]
