"""From choices as people write them to the token paths that continue a prompt.

Plain ``tokenize(choice)`` is wrong in two ways. SentencePiece models put an invisible space
before the first word of a text, so a choice tokenized alone begins with a piece that the middle
of a text never has. And a model that has just written ``Action:`` goes on with ``" PLAY"``, not
``"PLAY"``: one token with its space, which no trie of ``"PLAY"`` holds. So every choice is
tokenized behind the prompt's own last words, and by default both with and without the space:
two paths of one leaf, and the model decides.

Where the prompt's end would itself have merged with the choice (``http:`` before ``//``, a space
before a word, half a word), no path is what the model was trained on. ``heal`` takes the prompt's
last tokens back and begins every path with what the vocabulary makes of both together.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar, runtime_checkable

from trie_sampler.choices import Choices, Spelling
from trie_sampler.errors import VocabMismatchError, warn
from trie_sampler.progress import Progress

_T = TypeVar("_T")

# Choices from which threads are worth starting, and how many a thread takes at a time.
_MANY_CHOICES = 4096
_PART = 512

OPENERS = "\"'`([{<«“‘„‹「『（"
"""After one of these a word begins without a space."""

# Texts whose last token nothing after them merges with, tried in turn where the prompt's own
# end would merge with a choice.
_ANCHORS = ("\n", ".", ")", "|", "a")

# UTF-8: the bytes of a character after its first are 10xxxxxx.
_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80

# Tokens of the prompt that are tokenized again before each choice. Enough for a word and what
# stands before it; where the short window does not tokenize back to itself, longer ones follow.
_WINDOWS = (8, 32, 128)

FINGERPRINT_FORM = "vocab-sha256:"
"""How the fingerprint of a vocabulary begins; see ``trie_sampler.model_id``."""

MAX_TEXT_LENGTH = 10_000
"""Characters of a choice. Some vocabularies' regular expressions recurse once a character and end the process."""


@runtime_checkable
class Tokenizer(Protocol):
    """A vocabulary, as the core needs it; ``llama.vocab`` makes one of a ``Llama``.

    One that may be asked by several threads at once, and gains by it, also has an ``n_threads``.
    """

    @property
    def n_vocab(self) -> int:
        """V: ids are 0 .. V-1."""

    @property
    def eog_ids(self) -> Sequence[int]:
        """Every id that ends a generation, ascending."""

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        """Ids of UTF-8 text, without BOS; control tokens are parsed only if ``special``."""

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of the tokens' pieces; control tokens give their text only if ``special``."""

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""

    def is_control(self, token: int) -> bool:
        """Whether ``token`` is a control token: BOS, end of turn, unused ..."""


@dataclass(frozen=True)
class Spelled:
    """Choices as paths, a name once per path.

    Attributes:
        paths: (name, token ids); under ``every`` (name, bytes).
        tail: the end of the prompt's text that the paths follow.
        every: whether the paths are bytes, to be written in every way.
        healed: bytes of the prompt that each path writes again.
        n_healed: tokens that healing takes off the prompt's end.
        doubts: what a caller should hear of, in sentences.
    """

    paths: tuple[tuple[str, Sequence[int]], ...]
    tail: bytes
    every: bool = False
    healed: bytes = b""
    n_healed: int = 0
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """The end of a prompt: what a choice is tokenized behind.

    Attributes:
        text: bytes of the window, whole characters.
        tokens: what the vocabulary makes of ``text``; ends like the prompt. Empty where no text
            tokenizes to the prompt's last ids.
        spaceless: whether ``lead="auto"`` takes no space here.
        n_healable: how many of the last tokens can be taken back: they are the prompt's own, and
            something is left before them.
    """

    text: bytes
    tokens: tuple[int, ...]
    spaceless: bool
    n_healable: int = 0

    @property
    def in_quotes(self) -> bool:
        """Whether the prompt ends in the quote that opens a JSON string."""
        return self.text.endswith(b'"')


START = Edge(b"", (), True)
"""The start of a text, and just after a control token."""


def edge_of(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Edge:
    """The last words of a prompt that reproduce its last tokens when tokenized alone.

    Looks at the tokens after the last control token only: no piece spans one.
    """
    first = len(prompt_ids)
    while first > 0 and len(prompt_ids) - first < _WINDOWS[-1]:
        if tokenizer.is_control(prompt_ids[first - 1]):
            break
        first -= 1
    tail = list(prompt_ids[first:])
    if not tail:
        return START
    last = tokenizer.detokenize(tail[-_WINDOWS[0] :]).decode("utf-8", "ignore")[-1:]
    spaceless = not last or last.isspace() or last in OPENERS
    line = _last_line(tokenizer, tail)
    for size in (line, *(size for size in _WINDOWS if size < len(tail)), len(tail)):
        text = _from_whole_character(tokenizer.detokenize(tail[len(tail) - size :]))
        tokens = tokenizer.tokenize(text) if text and _is_text(text) else []
        n_equal = _count_equal(reversed(tokens), reversed(tail))
        # A window cut anywhere may begin with other tokens than the prompt has there, a line may not.
        if n_equal >= max(1, size if size == line else size // 2):
            return Edge(text, tuple(tokens), spaceless, min(n_equal, len(prompt_ids) - 1))
    # Ids that no text tokenizes to (a cut character, a split word): nothing to stand behind.
    return Edge(tokenizer.detokenize(tail), (), spaceless)


def _last_line(tokenizer: Tokenizer, tail: Sequence[int]) -> int:
    """Tokens from the last line feed on, 0 where it is not near.

    Pieces do not reach over a line feed into a word, so it cuts as well as any window; and prompts made of one
    template then have one edge, whatever was filled in above, and share their tries.
    """
    size = 0
    for place, token in enumerate(reversed(tail[-_WINDOWS[0] :]), start=1):
        piece = tokenizer.detokenize((token,))
        if size and not piece.isspace():
            return size
        # White space before a line feed may be cut together with it.
        if size or piece.endswith(b"\n"):
            size = place
    return 0


def _from_whole_character(text: bytes) -> bytes:
    """``text`` without the continuation bytes of a character cut at its start."""
    start = 0
    while start < min(len(text), 3) and text[start] & _CONTINUATION_MASK == _CONTINUATION:
        start += 1
    return text[start:]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _count_equal(a: Iterable[int], b: Iterable[int]) -> int:
    """How many items two sequences begin with in common."""
    n_equal = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        n_equal += 1
    return n_equal


def tokenize_choices(
    tokenizer: Tokenizer, choices: Choices, prompt_ids: Sequence[int] | None, **settings: Any
) -> Spelled:
    """Token paths of choices as they continue a prompt.

    Args:
        tokenizer: the vocabulary.
        choices: N choices.
        prompt_ids: the prompt's tokens; ``None`` where it is not known: both spellings are taken
            under ``lead="auto"``, tokenized as at the start of a text.
        settings: of ``Spelling``.

    Returns:
        At least one path a choice. A choice without text has an empty one.

    Raises:
        ValueError: a setting out of range; a choice of more than 10,000 characters.
        VocabMismatchError: tokens that do not spell the choice, or control tokens among them.

    Warns:
        TrieSamplerWarning: the prompt's last tokens would have merged with a choice; some choices
            begin with a space and some do not.

    Cost: about 30 us a choice and spelling.
    """
    edge = START if prompt_ids is None else edge_of(tokenizer, prompt_ids)
    spelled = spell_choices(tokenizer, choices, edge, Spelling(**settings), known=prompt_ids is not None)
    for doubt in spelled.doubts:
        warn(doubt)
    return spelled


def spell_choices(
    tokenizer: Tokenizer, choices: Choices, edge: Edge, spelling: Spelling, *, known: bool = True
) -> Spelled:
    """``tokenize_choices`` behind an edge that is at hand, without a warning; not ``known``: behind anything."""
    _refuse_long_texts(choices, spelling)
    doubts = _find_mixed_leads(choices, spelling)
    if spelling.heal:
        merges = find_merges(tokenizer, choices, edge, spelling)
        if merges.can_heal and merges.n_healed:
            return _spell_healed(tokenizer, choices, edge, spelling, merges.n_healed, tuple(doubts))
        if not merges.can_heal:
            doubts.append(
                f"the prompt's end, {_shown(edge.text)}, cannot be healed: no tokenization that the vocabulary "
                "itself would make stands before it"
            )
    forms = _forms(choices, edge, spelling, known=known)
    if spelling.tokenization == "every":
        written = tuple((name, text.encode()) for name, texts in forms for text in texts or ("",))
        return Spelled(written, edge.text, every=True, doubts=tuple(doubts))
    plain_tokens: set[int] = set()

    def spell(name: str, texts: tuple[str, ...]) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
        """The paths of a choice, and whether the prompt's end would have merged with it."""
        if not texts:
            return [(name, ())], False
        clean = []
        for text in texts:
            plain, behind = _split_at_controls(tokenizer, text.encode(), special=spelling.special)
            tokens = _continue(tokenizer, edge, plain)
            if tokens is not None and not known and tokenizer.detokenize(tokens) == b" " + plain:
                # At the start of a text this vocabulary always writes a space; in mid-text it need not.
                tokens = _stand_alone(tokenizer, plain)
            if tokens is not None:
                clean.append((text, tokens + behind))
        is_merged = not clean
        if is_merged:
            plain, behind = _split_at_controls(tokenizer, texts[0].encode(), special=spelling.special)
            clean = [(texts[0], _stand_alone(tokenizer, plain) + behind)]
        for text, tokens in clean:
            _check_spelling(tokenizer, name, text.encode(), tokens, plain_tokens, special=spelling.special)
        return [(name, tokens) for _, tokens in clean], is_merged

    paths: list[tuple[str, tuple[int, ...]]] = []
    merged: list[str] = []
    for spelled, is_merged in _work_on(tokenizer, forms, len(choices.names), spell):
        paths += spelled
        if is_merged:
            merged.append(spelled[0][0])
    if merged:
        doubts.append(
            f"the prompt ends in {_shown(edge.text)}, whose last token the "
            f"vocabulary would have merged with the choice {_some_names(merged)}"
            "; models rarely see such a split: "
            + ("" if spelling.heal else "pass heal=True, or ")
            + "end the prompt before the space or the half word"
        )
    return Spelled(tuple(paths), edge.text, doubts=tuple(doubts))


def _forms(
    choices: Choices, edge: Edge, spelling: Spelling, *, known: bool = True
) -> Iterator[tuple[str, tuple[str, ...]]]:
    return choices.forms(spelling, both_leads=not (edge.spaceless and known), in_quotes=edge.in_quotes)


@dataclass(frozen=True)
class Merges:
    """What would have merged over a prompt's end.

    Attributes:
        names: choices that would have.
        n_healed: tokens that healing takes back for them.
        can_heal: whether it can.
    """

    names: tuple[str, ...]
    n_healed: int
    can_heal: bool


def find_merges(tokenizer: Tokenizer, choices: Choices, edge: Edge, spelling: Spelling) -> Merges:
    """Which choices, in any of their forms, the vocabulary would not cut where the prompt ends."""
    n_before = len(edge.tokens)

    def cut(name: str, texts: tuple[str, ...]) -> tuple[str, int]:
        """How many of the edge's tokens stay what they are before all forms of a choice."""
        plains = [_split_at_controls(tokenizer, text.encode(), special=spelling.special)[0] for text in texts]
        cuts = [_count_equal(edge.tokens, tokenizer.tokenize(edge.text + plain)) for plain in plains]
        return name, min(cuts, default=n_before)

    forms = _forms(choices, edge, spelling) if n_before else ()
    cuts = list(_work_on(tokenizer, forms, len(choices.names), cut))
    names = [name for name, n_equal in cuts if n_equal < n_before]
    kept = min((n_equal for _, n_equal in cuts), default=n_before)
    n_healed = n_before - kept
    return Merges(tuple(names), n_healed, n_healed <= edge.n_healable and (n_before > 0 or not edge.text))


def _spell_healed(
    tokenizer: Tokenizer, choices: Choices, edge: Edge, spelling: Spelling, n_healed: int, doubts: tuple[str, ...]
) -> Spelled:
    """Paths that begin by writing the prompt's last tokens again, together with the choice."""
    n_kept = len(edge.tokens) - n_healed
    healed = tokenizer.detokenize(edge.tokens[n_kept:])
    tail = edge.text[: len(edge.text) - len(healed)]
    every = spelling.tokenization == "every"
    plain_tokens: set[int] = set()

    def spell(name: str, texts: tuple[str, ...]) -> list[tuple[str, Sequence[int]]]:
        paths: list[tuple[str, Sequence[int]]] = []
        for text in texts:
            if every:
                paths.append((name, healed + text.encode()))
                continue
            plain, behind = _split_at_controls(tokenizer, text.encode(), special=spelling.special)
            tokens = (*tokenizer.tokenize(edge.text + plain)[n_kept:], *behind)
            _check_spelling(tokenizer, name, healed + text.encode(), tokens, plain_tokens, special=spelling.special)
            paths.append((name, tokens))
        return paths or [(name, ())]

    spelled = _work_on(tokenizer, _forms(choices, edge, spelling), len(choices.names), spell)
    return Spelled(tuple(chain.from_iterable(spelled)), tail, every, healed, n_healed, doubts)


def _continue(tokenizer: Tokenizer, edge: Edge, text: bytes) -> tuple[int, ...] | None:
    """Tokens of ``text`` behind the edge, or None where the cut between them is not clean."""
    if not text:
        return ()
    if edge is START:
        tokens = tokenizer.tokenize(text)
        if len(text) > 1 and text.startswith(b" ") and tokenizer.detokenize(tokens) == b" " + text:
            # This vocabulary itself puts a space before any text.
            tokens = tokenizer.tokenize(text[1:])
        return tuple(tokens)
    if not edge.tokens:
        return None
    tokens = tokenizer.tokenize(edge.text + text)
    n_before = len(edge.tokens)
    return tuple(tokens[n_before:]) if tuple(tokens[:n_before]) == edge.tokens else None


def _split_at_controls(tokenizer: Tokenizer, text: bytes, *, special: bool) -> tuple[bytes, tuple[int, ...]]:
    """Text up to the first control token in it, and the tokens from there on.

    Only the choice is parsed for control tokens, never the prompt's text before it.
    """
    if not special:
        return text, ()
    controls = [token for token in tokenizer.tokenize(text, special=True) if _is_no_text(tokenizer, token)]
    plain = text
    behind: list[int] = []
    position = 0
    for control in controls:
        written = tokenizer.detokenize((control,), special=True)
        start = text.find(written, position)
        if start < 0 or not written:
            raise VocabMismatchError(f"choice {text.decode()!r:.80}: this vocabulary cannot write it")
        if behind:
            behind += tokenize_alone(tokenizer, text[position:start])
        else:
            plain = text[:start]
        behind.append(control)
        position = start + len(written)
    if behind:
        behind += tokenize_alone(tokenizer, text[position:])
    return plain, tuple(behind)


def _is_no_text(tokenizer: Tokenizer, token: int) -> bool:
    return tokenizer.is_control(token) or tokenizer.is_eog(token)


def tokenize_alone(tokenizer: Tokenizer, text: bytes) -> tuple[int, ...]:
    """Text with nothing before it, without the space that some vocabularies would put there."""
    tokens = tuple(tokenizer.tokenize(text)) if text else ()
    return tokens if tokenizer.detokenize(tokens) == text else _stand_alone(tokenizer, text)


def _stand_alone(tokenizer: Tokenizer, text: bytes) -> tuple[int, ...]:
    """Tokens of ``text`` in mid-text with nothing before it to merge with."""
    for anchor in _ANCHORS:
        before = anchor.encode()
        tokens = _continue(tokenizer, Edge(before, tuple(tokenizer.tokenize(before)), spaceless=False), text)
        if tokens is not None:
            return tokens
    raise VocabMismatchError(f"choice {text.decode()!r:.80} merges with whatever stands before it")


def continue_text(tokenizer: Tokenizer, before: Sequence[int], text: bytes) -> tuple[int, ...]:
    """Tokens of ``text`` behind the tokens of a prompt, as the vocabulary would cut it or, failing that, on its own.

    Raises:
        VocabMismatchError: the vocabulary cannot write it.
    """
    tokens = _continue(tokenizer, edge_of(tokenizer, before), text)
    if tokens is None or tokenizer.detokenize(tokens) != text:
        tokens = _stand_alone(tokenizer, text)
    _check_spelling(tokenizer, text.decode(), text, tokens, set())
    return tokens


def finish_leaf(tokenizer: Tokenizer, trie: Any, node: int, before: Sequence[int]) -> tuple[int, ...]:
    """The tokens that complete the only leaf left, as the vocabulary would write them behind ``before``.

    Args:
        tokenizer: the vocabulary that the trie was spelled with.
        trie: a graph of every spelling.
        node: a state.
        before: the tokens so far, to the state's.

    Returns:
        Tokens that walk the trie from ``node`` to the leaf's end; none where several leaves are left, or the
        leaf is complete. Where no text can follow here (inside a character), the longest pieces.
    """
    if trie.sole_leaf is None or trie.sole_leaf[node] < 0 or trie.is_terminal(node):
        return ()
    longest = []
    here = node
    while not trie.is_terminal(here):
        # Later nodes have more bytes behind them.
        edges = trie._edges_of(here)
        ends = trie.target[edges]
        # A damaged file may lead nowhere, or in a circle.
        if not len(ends) or not here < ends.max() < trie.n_nodes:
            return ()
        longest.append(int(trie.token[edges.start + ends.argmax()]))
        here = int(ends.max())
    rest = tokenizer.detokenize(longest)
    tokens = _continue(tokenizer, edge_of(tokenizer, before), rest) if _is_text(rest) else None
    return tokens if tokens is not None and tokenizer.detokenize(tokens) == rest else tuple(longest)


def _check_spelling(
    tokenizer: Tokenizer,
    name: str,
    text: bytes,
    tokens: tuple[int, ...],
    plain_tokens: set[int],
    *,
    special: bool = False,
) -> None:
    """Tokens must give the text back, byte for byte, a leading space apart.

    ``plain_tokens`` takes those that may be part of a choice, which need not be asked for again.
    """
    if not plain_tokens.issuperset(tokens):
        for place, token in enumerate(tokens):
            if tokenizer.is_eog(token) or (tokenizer.is_control(token) and not special):
                what = "ends the generation" if special else "is a control token; text from a user never makes one"
                raise VocabMismatchError(f"choice {name!r:.80}: token {token} at index {place} {what}")
        plain_tokens.update(tokens)
    # A Tokenizer that never parses control tokens need not know the argument.
    spelled = tokenizer.detokenize(tokens, special=True) if special else tokenizer.detokenize(tokens)
    if spelled not in (text, b" " + text):
        raise VocabMismatchError(
            f"choice {name!r:.80}: its tokens {list(tokens)!s:.80} spell {spelled!r:.80}: this vocabulary cannot write "
            "it"
        )


def _refuse_long_texts(choices: Choices, spelling: Spelling) -> None:
    longest = max(choices.texts, key=len)
    if len(longest) > MAX_TEXT_LENGTH and (spelling.heal or spelling.tokenization == "canonical"):
        raise ValueError(f"choice {longest!r:.40} has {len(longest)} characters; {MAX_TEXT_LENGTH} can be tokenized")


def _find_mixed_leads(choices: Choices, spelling: Spelling) -> list[str]:
    """Tell of ``[" yes", "no"]``: a slip that makes the model weigh two kinds of token."""
    if spelling.lead != "auto" or spelling.json_value:
        return []
    spaced = [text for text in choices.texts if text[:1] == " "]
    plain = [text for text in choices.texts if text and not text[0].isspace()]
    if not (spaced and plain):
        return []
    doubt = (
        f"some choices begin with a space ({spaced[0]!r}) and some do not ({plain[0]!r}); leave it to "
        'lead=, or pass lead="" where the spaces are meant'
    )
    return [doubt]


def _work_on(
    tokenizer: Tokenizer,
    forms: Iterable[tuple[str, tuple[str, ...]]],
    n_choices: int,
    work: Callable[[str, tuple[str, ...]], _T],
) -> Iterator[_T]:
    """Results of ``work(name, texts)`` in order; those of many choices from threads, where the vocabulary allows it."""
    n_threads = min(getattr(tokenizer, "n_threads", 1), os.cpu_count() or 1)
    with Progress("tokenizing choices", n_choices) as progress:
        if n_threads == 1 or n_choices < _MANY_CHOICES:
            for form in forms:
                yield work(*form)
                progress.advance()
            return
        waiting = iter(forms)
        with ThreadPoolExecutor(n_threads) as threads:
            running: deque[Future[list[_T]]] = deque()
            while True:
                while len(running) < 2 * n_threads and (part := list(islice(waiting, _PART))):
                    running.append(threads.submit(lambda part: [work(*form) for form in part], part))
                if not running:
                    return
                done = running.popleft().result()
                yield from done
                progress.advance(len(done))


def _shown(text: bytes) -> str:
    return repr(text[-20:].decode("utf-8", "replace"))


def _some_names(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
