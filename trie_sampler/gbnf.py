r"""GBNF, llama.cpp's grammars, as text: things put into rules, and what llama.cpp's parser does not survive.

The format is that of ``grammars/README.md`` in llama.cpp.
"""

from __future__ import annotations

import re

JSON_VALUE = r"""
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? ws "}"
array ::= "[" ws (value ("," ws value)*)? ws "]"
string ::= "\"" (plain | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]))* "\""
plain ::= [ !#-\[\]-~\u0080-\uD7FF\uE000-\U0010FFFF]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= " "?
"""
"""Rules of JSON with at most one space between things: a model cannot stall in white space."""

# llama.cpp's parser calls itself for every parenthesis, and looks for left recursion through every rule; groups
# and repetitions are rules of its own.
_DEEPEST = 1_000
_MOST_RULES = 20_000

_FIRST_PRINTABLE = 0x20
_RULE_NAME = re.compile(r"^\s*([A-Za-z0-9-]+)\s*::=", re.MULTILINE)
# Quoted text, a class of characters, a comment; what is never closed goes to the end, or the search for its end
# would begin anew at every place.
_OPAQUE = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\n]*'
# The same, a token, a repetition; and a name.
_PART = re.compile(rf"{_OPAQUE}|<[^>\n]*>|\{{[^}}\n]*\}}|[A-Za-z0-9-]+", re.DOTALL)
_MARK = re.compile(rf"{_OPAQUE}|(?P<mark>::=|[()*+?]|\{{\s*(?P<fewest>\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\}})", re.DOTALL)


def check_grammar(grammar: str) -> None:
    """Refuse what makes llama.cpp's parser overflow its stack, or count down for ever; other faults it tells itself.

    An ambiguous grammar can still take it time that grows exponentially, to parse as well as to follow.

    Raises:
        ValueError: parentheses nested too deeply, too many rules, or a repetition ``{m,n}`` with n < m.
    """
    depth = n_rules = 0
    for part in _MARK.finditer(grammar):
        mark = part["mark"]
        if mark is None:
            continue
        depth += {"(": 1, ")": -1}.get(mark, 0)
        n_rules += mark != ")"
        if depth > _DEEPEST:
            raise ValueError(f"the grammar nests parentheses more than {_DEEPEST:,} deep")
        if n_rules > _MOST_RULES:
            raise ValueError(f"the grammar has more than {_MOST_RULES:,} rules, groups and repetitions")
        if part["most"] and int(part["most"][:20]) < int(part["fewest"][:20]):
            raise ValueError(f"the grammar repeats something {mark}, at least more often than at most")


def embed(rule: str, prefix: str) -> str:
    """Rules under names of their own, the first of them ``PREFIXroot``.

    Args:
        rule: whole rules with a ``root``; or the right side of one, rules that it uses behind it.
        prefix: of their names; others are left as they are, so they may be those of ``JSON_VALUE``.

    Example:
        >>> print(embed('[0-9]+ "%"', "share-"))
        share-root ::= (
        [0-9]+ "%"
        )
    """
    names = set(_RULE_NAME.findall(rule))
    if not names:
        # Between brackets a right side may have several lines, and comments.
        rule = f"root ::= (\n{rule}\n)"
    elif "root" not in names:
        rule = f"root ::= {rule}"
    names.add("root")
    return _PART.sub(lambda part: prefix + part[0] if part[0] in names else part[0], rule)


def quote(text: str) -> str:
    r"""A text as a GBNF literal.

    Raises:
        ValueError: it has a NUL character, at which llama.cpp's texts end.

    Example:
        >>> print(quote('say "hi"'))
        "say \"hi\""
    """
    if "\0" in text:
        raise ValueError(f"a grammar cannot have the NUL character of {text!r:.80}")
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return f"\\x{ord(character):02X}" if ord(character) < _FIRST_PRINTABLE else character
