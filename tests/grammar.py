"""llama.cpp's own grammar over a list of choices, and brute force over bytes. Imports nothing of the library.

Both answer one question: which ids may follow what has been written? The grammar reads code points, the brute force
bytes; where they differ is said in ``spells_utf8``. llama_cpp is imported inside functions: modules of tests are
collected without it.
"""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llama_cpp import Llama

Ids = npt.NDArray[np.int32]

_LONGEST_PIECE = 256


def escaped(text: str) -> str:
    """A text between the quotes of a GBNF literal, in ASCII."""
    out = []
    for character in text:
        code = ord(character)
        if character in '"\\':
            out.append("\\" + character)
        elif 0x20 <= code < 0x7F:
            out.append(character)
        elif code <= 0xFF:
            out.append(f"\\x{code:02X}")
        elif code <= 0xFFFF:
            out.append(f"\\u{code:04X}")
        else:
            out.append(f"\\U{code:08X}")
    return "".join(out)


def gbnf(choices: Iterable[str]) -> str:
    """The grammar of exactly these texts. U+0000 has none: the grammar's decoder ends there."""
    return "root ::= " + " | ".join(f'"{escaped(choice)}"' for choice in choices)


@dataclass(frozen=True)
class Vocabulary:
    """Every id's bytes as text: control tokens, unknown ones and ends of generation have none and spell nothing."""

    piece_of: tuple[bytes, ...]
    pieces: Mapping[bytes, Sequence[int]]
    eog: Ids

    @classmethod
    def of(cls, llm: Llama) -> Vocabulary:
        """Asked id by id: 0.5 s for 262,144."""
        import llama_cpp

        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        buffer = ctypes.create_string_buffer(_LONGEST_PIECE)
        piece_of: list[bytes] = []
        pieces: dict[bytes, list[int]] = {}
        eog = []
        for token in range(llm.n_vocab()):
            is_eog = llama_cpp.llama_vocab_is_eog(vocab, token)
            if is_eog:
                eog.append(token)
            size = llama_cpp.llama_token_to_piece(vocab, token, buffer, _LONGEST_PIECE, 0, False)
            assert size >= 0, f"the piece of {token} has {-size} bytes"
            spells = not is_eog and not llama_cpp.llama_vocab_is_control(vocab, token)
            piece = buffer.raw[:size] if spells else b""
            piece_of.append(piece)
            if piece:
                pieces.setdefault(piece, []).append(token)
        return cls(tuple(piece_of), pieces, np.array(eog, np.int32))


def brute_force_valid_ids(pieces: Mapping[bytes, Sequence[int]], choices: Iterable[str], prefix: bytes) -> Ids:
    """Ids, ascending, whose bytes go on from ``prefix`` along a choice; ``pieces`` maps bytes to their ids."""
    found: set[int] = set()
    for choice in choices:
        text = choice.encode()
        if text.startswith(prefix):
            for stop in range(len(prefix) + 1, len(text) + 1):
                found.update(pieces.get(text[len(prefix) : stop], ()))
    return np.array(sorted(found), np.int32)


def spells_utf8(text: bytes) -> bool:
    """Whether some UTF-8 text begins with these bytes.

    The grammar does not ask. It holds a cut character against the range of code points that its bits may still become,
    one candidate at a time, so that a lead byte of one choice may be followed by another's bits: with "\U0001f44d" and
    "\u6771" it takes F0 86 9D B1 as an overlong "\u6771". Nor does it look at the top bits of what follows a lead byte.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True


def is_whole_utf8(text: bytes) -> bool:
    """Whether no character is cut at the end."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class GrammarSampler:
    """llama.cpp's grammar sampler at one state; over a vocabulary of V ids a question costs V decoded pieces."""

    def __init__(self, llm: Llama, text: str) -> None:
        import llama_cpp

        # The model owns the vocabulary.
        self._llm = llm
        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._sampler: Any = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not self._sampler:
            raise ValueError(f"llama.cpp refuses the grammar {text!r}")
        fields = [("id", np.intc), ("logit", np.single), ("p", np.single)]
        self._records = np.zeros(llm.n_vocab(), np.dtype(fields, align=True))
        self._records["id"] = np.arange(llm.n_vocab())
        self._valid: Ids | None = None

    def valid_ids(self) -> Ids:
        """Ids that the grammar leaves, ascending: those of control tokens and of ends of generation among them."""
        import llama_cpp

        self._records["logit"] = 0.0
        data = ctypes.cast(self._records.ctypes.data, llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(data, len(self._records), -1, False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        self._valid = self._records["id"][self._records["logit"] > -np.inf].astype(np.int32)
        return self._valid

    def accept(self, token: int) -> None:
        """One token further; only after ``valid_ids`` named it, because llama.cpp ends the process for another."""
        import llama_cpp

        if self._valid is None or token not in self._valid:
            raise ValueError(f"the grammar has not been asked, or does not allow {token}")
        llama_cpp.llama_sampler_accept(self._sampler, token)
        self._valid = None

    def clone(self) -> GrammarSampler:
        """Another one at the same state. The records are shared: they hold nothing between questions."""
        import llama_cpp

        other = GrammarSampler.__new__(GrammarSampler)
        other._llm, other._records, other._valid = self._llm, self._records, self._valid
        other._sampler = llama_cpp.llama_sampler_clone(self._sampler)
        return other

    def close(self) -> None:
        """Free it; again does nothing."""
        import llama_cpp

        if self._sampler is not None:
            llama_cpp.llama_sampler_free(self._sampler)
            self._sampler = None
