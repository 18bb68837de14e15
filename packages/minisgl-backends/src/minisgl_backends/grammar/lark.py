"""Grammars in llguidance's dialect of Lark's notation (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from minisgl_core.contracts.grammar import WHITESPACE
from minisgl_core.structured_outputs import StructuralTag, TaggedStructure

_COMPACT = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
"""At most one space after a comma or a colon. Wider whitespace costs tokens, and small models sometimes never leave it."""
NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Leave the tokens of forced text to the model.

llguidance computes the whole forced text ahead and without its limits: `a{1000000000}` stands for a second of work.
"""
MAX_EBNF_CHARS = 20_000
"""EBNF is translated by Python code, whose time grows with the square of its length."""

MAX_RULES = 300
"""llguidance's time for terminals that are made of each other, a fault of which it reports at each, grows with the square."""
_RULE = re.compile(r"^[ \t]*[?!]?\w[^\":\n]*:", re.MULTILINE)
_NAME = re.compile(r""""(?:\\.|[^"\\\n])*"|//.*|#.*|/(?:\\.|[^/\\\n])+/|<[^<>\s"]+>""")
"""What may be a token's name, and what may look as if it held one: a text, a comment, a regular expression."""

Tags = Mapping[str, int]
"""The tokens that llguidance does not take for text, by what they are called."""


def from_grammar(text: str, special: Tags) -> str:
    """A context-free grammar of a user's: as it is but for the names of special tokens, or translated from EBNF.

    Raises:
        ValueError: it is no EBNF, or too long.
    """
    if (num_rules := len(_RULE.findall(text))) > MAX_RULES:
        raise ValueError(f"a grammar may have {MAX_RULES} rules, and this has {num_rules}")
    if "::=" not in text or is_lark_syntax(text):
        return _NAME.sub(lambda found: f"<[{special[found[0]]}]>" if found[0] in special else found[0], text)
    if len(text) > MAX_EBNF_CHARS:
        raise ValueError(f"EBNF may have {MAX_EBNF_CHARS} characters, and Lark's notation more; this has {len(text)}")
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # what it raises shares no base
        raise ValueError(str(error)) from None


def tagged_json(parts: Mapping[str, Any], tags: Tags) -> str:
    """A ``tagged_json``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    most = parts["max_items"]
    more = "*" if most is None else f"{{0,{most - 1}}}"
    rules = [
        "items: item" if most == 1 else f"items: item ({_literal(parts['separator'], tags)} item){more}",
        f"item: {_literal(parts['prefix'], tags)} {_value(parts['schema'])} {_literal(parts['suffix'], tags)}",
    ]
    if parts.get("otherwise") is not None:
        return "\n".join(["start: items | otherwise", *rules, f"otherwise: {_value(parts['otherwise'])}"])
    return "\n".join(["start: items", *rules])


def structural_tag(tag: StructuralTag, tags: Tags) -> str:
    """A ``structural_tag``; see `minisgl_core.contracts.grammar.GrammarKind`.

    A lazy lexeme ends where its trigger does, so that no text goes on beyond one.
    """
    structures: dict[str, list[TaggedStructure]] = {}
    for each in tag.structures:
        structures.setdefault(tag.trigger_of(each), []).append(each)
    rules, items = ["start: item* TEXT", r"TEXT: /(.|\n)*/"], []
    for place, (trigger, following) in enumerate(structures.items()):
        after = [
            f"{_literal(each.begin[len(trigger) :], tags)} {_value(each.schema)} {_literal(each.end, tags)}"
            for each in following
        ]
        rules += [f"text{place}[lazy]: TEXT {json.dumps(trigger)}", f"after{place}: {' | '.join(after)}"]
        items.append(f"text{place} after{place}")
        if trigger in tags:
            items.append(f"TEXT <[{tags[trigger]}]> after{place}")
    if free := sorted(place for text, place in tags.items() if text not in structures):
        items.append(f"TEXT <[{','.join(map(str, free))}]>")
    return "\n".join([*rules, f"item: {' | '.join(items)}"])


def _literal(text: str, tags: Tags) -> str:
    """A text; tags in it are tokens."""
    tag = re.compile("|".join(f"({re.escape(each)})" for each in tags) or "(?!)")
    pieces = (piece for piece in tag.split(text) if piece)
    return " ".join(f"<[{tags[piece]}]>" if piece in tags else json.dumps(piece) for piece in pieces)


def regex(pattern: str) -> str:
    """A ``regex``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    return f"start: /{regex_to_lark(pattern, use_ascii='')}/" if pattern else 'start: ""'


def json_value(schema: Any) -> str:
    """A ``json_schema``; see `minisgl_core.contracts.grammar.GrammarKind`."""
    return f"start: {_value(schema)}"


def without_tokens(text: str) -> str:
    """A user's grammar with one token in the place of every special token: it costs the same to compile."""
    return _NAME.sub(lambda found: "<[0]>" if found[0].startswith("<") else found[0], text)


def _value(schema: Any) -> str:
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    whitespace = schema.get(WHITESPACE)
    if not isinstance(whitespace, str | None):
        raise ValueError(f"{WHITESPACE} must be a pattern")
    rest = {name: value for name, value in schema.items() if name != WHITESPACE}
    options = (
        _COMPACT if whitespace is None else {"whitespace_pattern": whitespace or None, "whitespace_flexible": False}
    )
    return "%json " + json.dumps({"x-guidance": options} | rest)
