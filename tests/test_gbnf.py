"""Grammars as text: what is quoted reads back, and what llama.cpp's parser does not survive is refused."""

from __future__ import annotations

import time

import pytest

from trie_sampler.gbnf import JSON_VALUE, check_grammar, embed, quote


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ("root ::= " + "(" * 1_001 + '"a"' + ")" * 1_001, "deep"),
        ("root ::= " + "(" * 100_000, "deep"),
        ('root ::= "a"' + "*" * 100_000, "rules"),
        ("\n".join(f"r{i} ::= r{i + 1}" for i in range(20_001)), "rules"),
        ('root ::= "a"{2,1}', "{2,1}"),
        ('root ::= ("b" "a"{ 20 , 3 })', "{ 20 , 3 }"),
        ('root ::= "a"{99999999999999999999999999999,1}', "{999"),
    ],
)
def test_what_the_parser_does_not_survive(grammar: str, part: str) -> None:
    with pytest.raises(ValueError, match="grammar") as caught:
        check_grammar(grammar)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        JSON_VALUE,
        'root ::= "a"{1,2} "b"{2} "c"{0,} "d"{3,3}',
        'root ::= "a{2,1}" [{2,1}] # {2,1}\n',
        r'root ::= "\"{2,1}" [\]{2,1}]',
        "root ::= " + "(" * 1_000 + '"a"' + ")" * 1_000,
        'root ::= "' + "(" * 5_000 + '"',
        "root ::= [" + "(" * 5_000 + "]",
        "root ::= " + " | ".join(f'"{i}"' for i in range(50_000)),
    ],
)
def test_what_is_let_through(grammar: str) -> None:
    check_grammar(grammar)


def test_checking_takes_no_time_out_of_proportion() -> None:
    # Quadratic work would take minutes.
    start = time.perf_counter()
    for text in (
        "[" * 200_000 + "\\",
        '"[' * 100_000 + '"\\',
        '"' * 200_001,
        "[" * 200_000,
        "\\" * 200_000,
        "{1," * 100_000,
        "{" + " " * 200_000,
        "#" * 200_000,
    ):
        check_grammar("root ::= " + text)
    assert time.perf_counter() - start < 10.0


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("a", '"a"'), ("", '""'), ('"', r'"\""'), ("\\", r'"\\"'), ("\n\x1f", r'"\x0A\x1F"'), ("Ж", '"Ж"')],
)
def test_quoting(text: str, quoted: str) -> None:
    assert quote(text) == quoted


def test_a_nul_has_no_place_in_a_grammar() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


@pytest.mark.parametrize(
    ("rule", "embedded"),
    [
        ('"a"', 's-root ::= (\n"a"\n)'),
        ("", "s-root ::= (\n\n)"),
        ('"1" | "2" # one or two', 's-root ::= (\n"1" | "2" # one or two\n)'),
        ('root ::= "a"', 's-root ::= "a"'),
        ('x\nx ::= "1"', 's-root ::= s-x\ns-x ::= "1"'),
        ("root ::= string", "s-root ::= string"),
        ('root ::= 0x {2}\n0x ::= "1"\n2 ::= ""', 's-root ::= s-0x {2}\ns-0x ::= "1"\ns-2 ::= ""'),
        (
            'root ::= word "word" [word] <word> # word\nword ::= "x" words\nwords ::= ""',
            's-root ::= s-word "word" [word] <word> # word\ns-word ::= "x" s-words\ns-words ::= ""',
        ),
    ],
)
def test_rules_get_names_of_their_own(rule: str, embedded: str) -> None:
    assert embed(rule, "s-") == embedded
