"""Translation of grammars to llguidance's dialect of Lark.

The dialect is documented at https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from minisgl_core.contracts.grammar import WHITESPACE
from minisgl_core.contracts.structured_outputs import StructuralTag

_COMPACT = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
"""At most one space after a comma or a colon. More whitespace costs tokens, and small models may emit it without end."""
_FORMATS = re.compile(
    "date-time|date|time|duration|(idn-)?email|(idn-)?hostname|ipv4|ipv6|(uri|iri)(-reference)?|uuid|uri-template"
    "|(relative-)?json-pointer|regex"
)
"""Matches the formats that JSON Schema defines. It ignores others, and llguidance refuses those that it cannot enforce."""
_DRAFTS = ("http://json-schema.org/draft-0", "https://json-schema.org/draft/20")
"""Beginnings of the values of ``$schema`` that llguidance knows. Without one, it assumes the draft 2020-12."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords of a schema whose value is an object of schemas by name."""
_NEGATED_CLASS = re.compile(r"(\\.)|\[\^(?!\])", re.DOTALL)
"""Matches the start of a negated character class, or an escaped character as group 1."""
NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Turn off forced tokens (fast-forwarding).

llguidance computes all forced text in advance and without limits: `a{1000000000}` takes a second. It also tokenizes forced text,
so text that spells a special token would become that token, which its parser then refuses.
"""
MAX_EBNF_CHARS = 20_000
"""Longest EBNF. It is translated by Python code whose time is quadratic in the length."""

MAX_RULES = 300
"""Maximum number of rules of a grammar. llguidance takes quadratic time for nested rules if it reports an error at each."""
_STRING, _REGEX = r'"(?:\\.|[^"\\\n])*"', r"/(?:\\.|[^/\\\n])+/"
_RULE = re.compile(rf'^[ \t]*[?!]?\w[^":\[\n]*+(?:\[(?:{_STRING}|{_REGEX}|[^"/\]\n])*+\])?+[^":\n]*+:', re.MULTILINE)
"""Matches a rule's name and attributes, such as ``word[capture="w"]:``. Nothing is tried twice, so the time is linear."""
_NAME = re.compile(rf'{_STRING}|//.*|#.*|{_REGEX}|<[^<>\s"]+>')
"""Matches token names, and strings, comments and regular expressions, in which a token name has no meaning."""

SpecialTokens = Mapping[str, int]
"""Ids of special tokens by their text. llguidance does not treat them as text."""


def from_grammar(text: str, special: SpecialTokens) -> str:
    """Translate a user's context-free grammar: replace the names of special tokens, or convert EBNF.

    Raises:
        ValueError: the grammar is too long, or is invalid EBNF.
    """
    if (num_rules := len(_RULE.findall(text))) > MAX_RULES:
        raise ValueError(f"a grammar may have {MAX_RULES} rules, and this one has {num_rules}")
    if "::=" not in text or is_lark_syntax(text):
        return _NAME.sub(lambda match: f"<[{special[match[0]]}]>" if match[0] in special else match[0], text)
    if len(text) > MAX_EBNF_CHARS:
        raise ValueError(
            f"EBNF may have up to {MAX_EBNF_CHARS} characters, and this one has {len(text)}; Lark grammars may be longer"
        )
    try:
        return gbnf_to_lark(text)
    except RecursionError:  # the caller reports it
        raise
    except Exception as error:  # its exceptions have no common base class
        raise ValueError(str(error)) from None


def tool_calls(source: Mapping[str, Any], special: SpecialTokens) -> str:
    """Translate ``tool_calls``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    parts = _Parts(special)
    if (triggers := source.get("triggers")) is not None:
        texts = {trigger: [parts.sequence(call) for call in calls] for trigger, calls in triggers.items()}
        return "\n".join([_free_text(texts, special), *parts.terminals])
    call = " | ".join(map(parts.sequence, source["calls"]))
    around = [parts.literal(source[name]) for name in ("begin", "separator", "end")]
    max_calls = source["max_calls"]
    more = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
    calls = "call" if max_calls == 1 else f"call ({around[1]} call){more}"
    rules = [f"calls: {around[0]} {calls} {around[2]}", f"call: {call}"]
    if source["otherwise"] is None:
        return "\n".join(["start: calls", *rules, *parts.terminals])
    return "\n".join(
        ["start: calls | otherwise", *rules, f"otherwise: {_value(source['otherwise'])}", *parts.terminals]
    )


class _Parts:
    """Translates parts of calls. Equal texts share a terminal, so that many of them cost little."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)  # as tokenizers match them
        self._tag = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._names: dict[str, str] = {}

    @property
    def terminals(self) -> list[str]:
        """Definitions of the terminals that the parts refer to."""
        return [f"{name}: {text}" for text, name in self._names.items()]

    def sequence(self, parts: Sequence[Any]) -> str:
        return " ".join(filter(None, map(self._part, parts))) or '""'

    def _part(self, part: Any) -> str:
        match part:
            case str():
                return self.literal(part)
            case {"schema": schema}:
                return _value(schema)
            case {"optional": parts}:
                return f"({self.sequence(parts)})?"
            case {"any_of": alternatives}:
                return f"({' | '.join(map(self.sequence, alternatives))})"
            case {"patterns": patterns, "excludes": excludes, "end": end}:
                return self._text(patterns, excludes, end)
        raise ValueError(f"a part of a call must be a text or an object with known members, and not {part!r}")

    def _text(self, patterns: Sequence[str], excludes: Sequence[str], end: str) -> str:
        """Return the text and its end. They are one terminal, as llguidance would extend a text beyond its end."""
        terms = [f"/{regex_to_lark(pattern, use_ascii='d')}/" for pattern in patterns]
        if excludes:
            terms.append(f"~(ANY ({' | '.join(map(json.dumps, excludes))}) ANY)")
            self._names["/(.|\\n)*/"] = "ANY"
        first, *rest = self._tag.split(end)
        text = f"({' & '.join(terms)}) {json.dumps(first)}"
        name = self._names.setdefault(text, f"PART{len(self._names)}")
        return f"{name} {self.literal(''.join(rest))}"

    def literal(self, text: str) -> str:
        """Return a text as strings in quotes, and special tokens by their ids."""
        pieces = filter(None, self._tag.split(text))
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece) for piece in pieces
        )


def structural_tag(tag: StructuralTag, special: SpecialTokens) -> str:
    """Translate a ``structural_tag``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    parts, structures = _Parts(special), dict[str, list[str]]()
    for each in tag.structures:
        begin = each.begin[len(trigger := tag.trigger_of(each)) :]
        structures.setdefault(trigger, []).append(parts.sequence([begin, {"schema": each.schema}, each.end]))
    return _free_text(structures, special)


def _free_text(structures: Mapping[str, Sequence[str]], special: SpecialTokens) -> str:
    """Return the grammar of free text with one of the given structures after each trigger.

    A lazy lexeme ends at the end of its trigger, so that free text cannot continue past a trigger.
    """
    rules, items = ["start: item* TEXT", r"TEXT: /(.|\n)*/"], []
    for index, (trigger, following) in enumerate(structures.items()):
        rules += [f"text{index}[lazy]: TEXT {json.dumps(trigger)}", f"after{index}: {' | '.join(following)}"]
        items.append(f"text{index} after{index}")
        if trigger in special:
            items.append(f"TEXT <[{special[trigger]}]> after{index}")
    if free := sorted(token_id for text, token_id in special.items() if text not in structures):
        items.append(f"TEXT <[{','.join(map(str, free))}]>")
    return "\n".join([*rules, f"item: {' | '.join(items)}"])


def regex(pattern: str) -> str:
    """Translate a ``regex``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    return f"start: /{regex_to_lark(pattern, use_ascii='d')}/" if pattern else 'start: ""'


def json_value(schema: Any) -> str:
    """Translate a ``json_schema``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    return f"start: {_value(schema)}"


def without_tokens(text: str) -> str:
    """Replace every special token of a user's grammar by token 0, which costs the same to compile."""
    return _NAME.sub(lambda match: "<[0]>" if match[0].startswith("<") else match[0], text)


def _value(schema: Any) -> str:
    """Return the directive for a JSON value of a schema, with the whitespace that the schema sets."""
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    whitespace = schema.get(WHITESPACE)
    if not isinstance(whitespace, str | None):
        raise ValueError(f"{WHITESPACE} must be a regular expression (a string)")
    rest: dict[str, Any] = _adapt({name: value for name, value in schema.items() if name != WHITESPACE})
    options: dict[str, Any] = (
        _COMPACT if whitespace is None else {"whitespace_pattern": whitespace or None, "whitespace_flexible": False}
    )
    if "\\u00" not in json.dumps(rest, ensure_ascii=False):
        # Without control characters, no such escapes are needed. llguidance does not see that "\\u0061" names the property "a".
        options = options | {"json_allowed_escapes": 'nrbtf\\"'}
    return "%json " + json.dumps({"x-guidance": options} | rest)


def _adapt(schema: Any, is_map: bool = False) -> Any:
    """Return a schema, or an object of schemas, that says the same and that llguidance reads correctly."""
    if isinstance(schema, list):
        return [_adapt(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if is_map:
        return {name: _adapt(value) for name, value in schema.items()}
    match schema:
        case {"oneOf": _, "discriminator": {"propertyName": str() as tag}}:
            # OpenAPI requires the property in each alternative, and pydantic does, but not in its schemas.
            schema = {"allOf": [{"required": [tag]}]} | schema
    has_no_effect = {
        "$schema": not str(schema.get("$schema")).startswith(_DRAFTS),
        "format": isinstance(text := schema.get("format"), str) and not _FORMATS.fullmatch(text),
        "propertyNames": schema.get("propertyNames") in ({"type": "string"}, {}, True),
        "uniqueItems": schema.get("uniqueItems") is False,
        "additionalItems": "prefixItems" in schema,  # llguidance would ignore prefixItems
    }
    return {name: _adapt_keyword(name, value) for name, value in schema.items() if not has_no_effect.get(name)}


def _adapt_keyword(name: str, value: Any) -> Any:
    if name == "pattern" and isinstance(value, str):
        # llguidance allows quotes and backslashes in a negated class, unless it excludes a control character.
        return _NEGATED_CLASS.sub(lambda match: match[1] or r"[^\x01", value)
    if name in ("exclusiveMinimum", "exclusiveMaximum") and value == 0 and value is not False:
        return 1e-9 if name == "exclusiveMinimum" else -1e-9  # llguidance allows 0 between 0 and a number below 1
    if name in ("const", "enum") and (rounded := [each for each in _integers(value) if abs(each) > 2**53]):
        raise ValueError(f"{name} has {rounded[0]}, and llguidance rounds integers beyond 2**53; use strings")
    if name in _BOUNDS and isinstance(value, int) and abs(value) < 2**63 - 1 and int(float(value)) != value:
        raise ValueError(f"{name} is {value}, and llguidance rounds integers beyond 2**53")
    is_literal = name in ("const", "enum", "default", "examples")
    return value if is_literal else _adapt(value, name in _SCHEMA_MAPS)


def _integers(value: Any) -> Iterator[int]:
    """Yield the integers in a JSON value, those in arrays and objects included."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)
    elif isinstance(value, int):
        yield value
