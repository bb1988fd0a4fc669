"""``TokenTrie``: the immutable trie over token paths, shared by everyone who walks it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from trie_sampler.automaton import ByteGraph, PieceIndex, write_in_every_way
from trie_sampler.build import build_arrays
from trie_sampler.choices import Choices, ChoicesLike
from trie_sampler.errors import (
    EmptyTrieError,
    TrieFileError,
    TrieSamplerError,
    UnknownPathError,
    VocabMismatchError,
    warn,
)
from trie_sampler.kernels import find_child_of
from trie_sampler.layout import LEAF, NO_LEAF, NO_TOKEN, NODE, TOKEN
from trie_sampler.payload import TokenTreePayload, collector_at_rest
from trie_sampler.ragged import Leaf, Names, NamesLike, RaggedPaths, some
from trie_sampler.store import StoredTrie, read_trie, write_trie
from trie_sampler.tokens import FINGERPRINT_FORM, Spelled, Tokenizer, tokenize_choices

if TYPE_CHECKING:
    from llama_cpp import Llama

_N_SAMPLED_LEAVES = 64
"""How many leaves of a payload are compared with their names to tell another model's payload."""


class Collision(NamedTuple):
    """Two names with equal tokens: only one could ever come out."""

    kept: str
    dropped: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class TokenTrie:
    """Token paths as three flat arrays, read-only; make one with a ``from_...`` method.

    Nodes are numbered breadth-first: the children of node ``s`` are the nodes
    ``first_child[s] .. first_child[s+1] - 1``, ascending by token. A payload's descriptors are
    several roots over the same arrays. 12 bytes a node, names apart. Threads and forks share it.

    With ``tokenization="every"`` paths join, and the trie is a graph with ``target``: the edges of node
    ``s`` are ``first_child[s] .. first_child[s+1] - 1``, and edge ``i`` leads to ``target[i]``.

    Attributes:
        token: [S] int32, the token that enters the node; -1 at a root. In a graph [E], that of the edge.
        first_child: [S+1] int32.
        leaf: [S] int32, index of the leaf that ends here; -1 where none does.
        depth: tokens of the longest path.
        n_leaves: leaves that can come out: names that no collision took the last path of.
        max_token: the largest token id of any path.
        tail: the prompt's text that the paths were tokenized after; ``None`` where unknown.
        target: [E] int32 in a graph, ``None`` in a tree.
        sole_leaf: [S] int32 in a graph: index of the leaf that must come out, -1 where it is open.
        healed: bytes of the prompt's end that each path writes again; see ``n_healed``.
        n_healed: tokens to take off the prompt's end before the trie begins.
        model_id: fingerprint of the vocabulary that spelled the choices; ``None`` where ids came from
            elsewhere.

    Example:
        >>> trie = TokenTrie.from_sequences([("REPLY", [5]), ("REPLY_THREAD", [5, 6])])
        >>> trie.children(trie.root).tolist()
        [5]
        >>> trie.leaf_name(trie.step(trie.root, 5))
        'REPLY'
    """

    token: npt.NDArray[np.int32]
    first_child: npt.NDArray[np.int32]
    leaf: npt.NDArray[np.int32]
    depth: int
    tail: bytes | None
    n_leaves: int
    max_token: int
    _roots: Mapping[str, int]
    _n_names: int
    _names: Names | None
    _collided: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32] | None = None
    sole_leaf: npt.NDArray[np.int32] | None = None
    healed: bytes = b""
    n_healed: int = 0
    model_id: str | None = None
    # Not so for a file whose content nobody has looked at; see ``_require_sound``.
    _is_sound: bool = True

    # --- making one ----------------------------------------------------------------------------

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Leaf],
        *,
        tail: bytes | None = None,
    ) -> TokenTrie:
        """Build from named token paths; one name may come with several.

        Args:
            sequences: ``TokenSequence`` or ``(name, tokens)``, read one at a time: an iterator will do. The order is
                of no account.
            tail: the text that the paths were tokenized behind, where that is known.

        Raises:
            EmptyTrieError: no leaf with a token.
            VocabMismatchError: a negative id, or one past int32.

        Cost: O(T) for T tokens in all, about 1 us a leaf; memory for arrays alone.
        """
        return cls._from_leaves([("", sequences)], tail)

    @classmethod
    def from_ragged(
        cls,
        tokens: npt.ArrayLike,
        offsets: npt.ArrayLike,
        names: NamesLike | None = None,
    ) -> TokenTrie:
        """Build from all paths in one array, the way for millions of them.

        Args:
            tokens: [T] integers, the paths one after the other.
            offsets: [N+1] integers, path i is ``tokens[offsets[i]:offsets[i+1]]``.
            names: [N] names, or ``NameBuffers``: an Arrow string array's buffers; ``None`` names a leaf by its
                index in decimal. Equal names are one leaf of several paths.

        Raises:
            ValueError: the shapes do not fit together.
            EmptyTrieError, VocabMismatchError: as ``from_sequences``.

        Cost: 6 s for 10 million paths of 5 tokens; while it builds, once or twice the memory of the finished arrays.
        int32 tokens and int64 offsets are not copied.

        Example:
            >>> trie = TokenTrie.from_ragged([5, 5, 6], [0, 1, 3])
            >>> trie.n_leaves, trie.n_nodes
            (2, 3)
            >>> from trie_sampler import NameBuffers
            >>> names = NameBuffers(b"REPLYREPLY_THREAD", [0, 5, 17])
            >>> TokenTrie.from_ragged([5, 5, 6], [0, 1, 3], names).leaf_name(2)
            'REPLY_THREAD'
        """
        return cls._from_paths(RaggedPaths.of_arrays(tokens, offsets, names), [""])

    @classmethod
    def from_payload(
        cls,
        payload: TokenTreePayload | str | bytes,
        path: str | None = None,
        *,
        vocab: Llama | Tokenizer | None = None,
        strict: bool = False,
        model_id: str | None = None,
    ) -> TokenTrie:
        """Build from the wire format: one root a descriptor, or only the one of ``path``.

        Args:
            payload: the model, or its JSON.
            path: take only this descriptor.
            vocab: check the ids against this vocabulary, and 64 leaves against their names.
            strict: make what is only doubtful an error instead of a warning; see ``check_vocab``.
            model_id: what the payload's ``modelId`` must be. Where it is not given, an id of the form that
                ``trie_sampler.model_id`` makes is compared with the vocabulary's own.

        Raises:
            PayloadError: malformed JSON or schema.
            EmptyTrieError: no descriptor, or one without any leaf that has tokens.
            UnknownPathError: no descriptor of that path.
            VocabMismatchError: ids outside the vocabulary, an end-of-generation id in a leaf, or
                under ``strict`` another model's id, or leaves that do not spell their names.
        """
        if not isinstance(payload, TokenTreePayload):
            payload = TokenTreePayload.from_json(payload)
        descriptors = payload.descriptors
        if path is not None:
            descriptors = tuple(d for d in descriptors if d.path == path)
            if not descriptors:
                raise UnknownPathError(_unknown_path(path, [d.path for d in payload.descriptors]))
        if not descriptors:
            raise EmptyTrieError("the payload has no descriptors, so there is nothing to choose from")
        with collector_at_rest():
            trie = cls._from_leaves([(d.path, d.leaves) for d in descriptors])
        tokenizer = None if vocab is None else as_tokenizer(vocab)
        _compare_model_ids(payload.model_id, model_id, tokenizer, strict=strict)
        if tokenizer is not None:
            trie.check_vocab(tokenizer, strict=strict)
        return trie

    @classmethod
    def from_choices(
        cls,
        llm: Llama | Tokenizer,
        choices: ChoicesLike,
        *,
        prompt: Any = None,
        lead: str = "auto",
        tokenization: str = "canonical",
        heal: bool = False,
        json_value: bool = False,
        case_fold: bool = False,
        special: bool = False,
    ) -> TokenTrie:
        """Build from text: each choice tokenized as it continues the prompt.

        Args:
            llm: a ``Llama``, or any ``Tokenizer``.
            choices: list of strings, dict name -> text, ``Enum`` class or ``Literal``.
            prompt: text, token ids or chat messages that the choice will follow; ``None`` is the
                start of a text. The space rules and merges at its end decide the tokens.
            lead: ``""`` or ``" "`` spells every choice so; ``"auto"`` takes no space after
                whitespace, an opening quote or bracket or a control token, else both spellings.
            tokenization: ``"canonical"``, one path a spelling, what the model was trained on; ``"every"``,
                all ways to write it with the vocabulary: what a grammar allows.
            heal: where the prompt's last tokens would have merged with a choice, begin with the merged
                ones; take ``n_healed`` tokens off the prompt then.
            json_value: write choices as JSON values with their closing quote, so that ``red`` and
                ``redwood`` part at ``"`` against ``w``. Names stay as they are.
            case_fold: accept each choice also in lower, upper and capitalized letters.
            special: let a choice's text name control tokens.

        Raises:
            EmptyTrieError: no choices, or none with a token.
            VocabMismatchError: a choice that the vocabulary cannot spell, or with a control token.
            TypeError, ValueError: an argument of another kind.

        Warns:
            TrieSamplerWarning: the prompt's end would merge with a choice in each of its spellings and is not
                healed (``check_prompt`` tells of any spelling); some choices begin with a space and some do not;
                a choice can never come out.

        Cost: about 30 us a choice and spelling, thousands of choices in up to four threads; ``"every"`` 10 us, and
        once a model 0.5 s for its pieces.
        """
        from trie_sampler.llama.vocab import prompt_tokens

        prompt_ids = None if prompt is None else prompt_tokens(llm, prompt)
        tokenizer = as_tokenizer(llm)
        spelled = tokenize_choices(
            tokenizer,
            Choices.of(choices),
            prompt_ids,
            lead=lead,
            tokenization=tokenization,
            heal=heal,
            json_value=json_value,
            case_fold=case_fold,
            special=special,
        )
        trie = cls._from_spelled(tokenizer, spelled)
        if trie.unreachable:
            warn(trie.tell_unreachable())
        return trie

    @classmethod
    def _from_spelled(cls, tokenizer: Tokenizer, spelled: Spelled) -> TokenTrie:
        """The trie of paths that a vocabulary spelled."""
        trie = cls._from_leaves([("", spelled.paths)], spelled.tail)
        if spelled.every:
            trie = trie._written_in_every_way(PieceIndex.of(tokenizer))
        return replace(
            trie,
            healed=spelled.healed,
            n_healed=spelled.n_healed,
            model_id=getattr(tokenizer, "fingerprint", None),
        )

    @classmethod
    def _of_numbers(cls, tokenizer: Tokenizer) -> TokenTrie:
        """JSON numbers in all ways to write them; the one leaf is called ``number``."""
        states = write_in_every_way(ByteGraph.of_numbers(), 1, PieceIndex.of(tokenizer))
        trie = cls._from_arrays(
            states.token,
            states.first_child,
            states.leaf,
            int(states.depth),
            None,
            {"": 0},
            1,
            Names.of(["number"]),
            np.empty((2, 0), LEAF),
            states.target,
            states.sole_leaf,
        )
        return replace(trie, model_id=getattr(tokenizer, "fingerprint", None))

    def _written_in_every_way(self, pieces: PieceIndex) -> TokenTrie:
        """The graph of all spellings of this trie's leaves, whose tokens are bytes."""
        graph = ByteGraph.of_trie(self.token, self.first_child, self.leaf)
        states = write_in_every_way(graph, len(self._roots), pieces)
        lost = np.setdiff1d(self.leaf, states.leaf)
        if lost.size:
            raise VocabMismatchError(f"choice {self.name_of(int(lost[0]))!r}: this vocabulary cannot write it")
        collided = self._collided.copy()
        collided[0] = states.state_of[collided[0]]
        return TokenTrie._from_arrays(
            states.token,
            states.first_child,
            states.leaf,
            int(states.depth),
            self.tail,
            self._roots,
            self._n_names,
            self._names,
            collided[:, collided[0] >= 0],
            states.target,
            states.sole_leaf,
        )

    @classmethod
    def _from_leaves(
        cls,
        groups: Sequence[tuple[str, Iterable[Leaf]]],
        tail: bytes | None = None,
    ) -> TokenTrie:
        """One root for each (path, leaves); leaves of one name within a group are one leaf."""
        paths = list(dict(groups))
        return cls._from_paths(RaggedPaths.collect(groups), paths, tail)

    @classmethod
    def _from_paths(cls, ragged: RaggedPaths, paths: Sequence[str], tail: bytes | None = None) -> TokenTrie:
        arrays = build_arrays(ragged.tokens, ragged.offsets, ragged.root_offsets, ragged.leaf)
        collided = np.stack([arrays.collided_node, arrays.collided_leaf])
        if ragged.names is not None and collided.size:
            collided = _settle_collisions(arrays.leaf, collided, ragged.names)
        return cls._from_arrays(
            arrays.token,
            arrays.first_child,
            arrays.leaf,
            arrays.depth,
            tail,
            {path: root for root, path in enumerate(paths)},
            ragged.n_leaves,
            ragged.names,
            collided,
        )

    @classmethod
    def _from_arrays(
        cls,
        token: npt.NDArray[np.int32],
        first_child: npt.NDArray[np.int32],
        leaf: npt.NDArray[np.int32],
        depth: int,
        tail: bytes | None,
        roots: Mapping[str, int],
        n_names: int,
        names: Names | None,
        collided: npt.NDArray[np.int32],
        target: npt.NDArray[np.int32] | None = None,
        sole_leaf: npt.NDArray[np.int32] | None = None,
        *origin: Any,
    ) -> TokenTrie:
        """Freeze arrays. Kernels index logits by token unchecked, so a negative one is refused here."""
        for array in (token, first_child, leaf, target, sole_leaf):
            if array is not None:
                array.setflags(write=False)
        ids = token[len(roots) :] if target is None else token
        if ids.size and ids.min() < 0:
            raise TrieSamplerError("damaged trie: 'tokens are ids' does not hold")
        reachable = np.zeros(n_names, bool)
        reachable[leaf[(leaf >= 0) & (leaf < n_names)]] = True
        n_leaves, max_token = int(np.count_nonzero(reachable)), int(token.max(initial=0))
        counts = (n_leaves, max_token, roots, n_names, names, collided, target, sole_leaf)
        return cls(token, first_child, leaf, depth, tail, *counts, *origin)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.token, self.first_child, self.leaf, self.depth, self.tail)
        names = (self._roots, self._n_names, self._names, self._collided)
        origin = (self.healed, self.n_healed, self.model_id, self._is_sound)
        return TokenTrie._from_arrays, (*arrays, *names, self.target, self.sole_leaf, *origin)

    # --- in a file -----------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write everything that the trie is into one file, for ``load``.

        The file is written under another name beside its own and takes its place when it is complete: who reads
        at that moment, or finds it after a crash, has the old one or the new one. So a trie may be saved over the
        file that it was loaded from (on Windows only with ``mmap=False``).

        Args:
            file: its name, by convention ``.trie``.

        Raises:
            OSError: it cannot be written; the old one is as it was.
            TrieSamplerError: the trie comes from a damaged file that was not verified.

        Cost: as fast as the disk; 12 bytes a node, in a graph 16 a node and 8 an edge, and the names.

        Example: see ``load``.
        """
        # A new checksum would vouch for it.
        self._require_sound()
        names = self._names
        write_trie(
            file,
            StoredTrie(
                token=self.token,
                first_child=self.first_child,
                leaf=self.leaf,
                target=self.target,
                sole_leaf=self.sole_leaf,
                collided=self._collided,
                name_offsets=None if names is None else names.offsets,
                name_bytes=None if names is None else names.blob,
                n_names=self._n_names,
                n_leaves=self.n_leaves,
                max_token=self.max_token,
                depth=self.depth,
                paths=self.paths,
                tail=self.tail,
                healed=self.healed,
                n_healed=self.n_healed,
                model_id=self.model_id,
            ),
        )

    @classmethod
    def load(cls, file: str | os.PathLike[str], *, mmap: bool = True, verify: bool | None = None) -> TokenTrie:
        """Read a file that ``save`` wrote.

        Sizes and the header's checksum are always checked, the content where ``verify`` says so. Where it was not,
        a damaged file may allow other tokens than it should, but it can neither crash the process nor hang it, and
        a query that goes through the whole trie anyway (``leaves``, ``check_vocab``, and so whatever binds the
        trie to a model) checks it first.

        Args:
            file: its name.
            mmap: leave the content in the file and read what is asked for, when it is asked for; processes share
                the memory. The file must not be changed in place meanwhile; ``save`` and renaming are safe.
                Pickles and deep copies of the trie are whole and need no file.
            verify: check the content's checksum and structure too; ``None`` does for files below 16 MiB.

        Raises:
            TrieFileError: not a trie, of another version, truncated or damaged; nothing is loaded.
            OSError: it cannot be read.

        Cost: O(1) where mapped and not verified, 0.3 ms for 10 million leaves; verifying 16 MiB takes about 10 ms.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     TokenTrie.from_sequences([("YES", [1, 2]), ("NO", [3])]).save(f"{folder}/answers.trie")
            ...     trie = TokenTrie.load(f"{folder}/answers.trie")
            >>> [name for name, _ in trie.leaves()]
            ['NO', 'YES']
        """
        stored, is_verified = read_trie(file, is_mapped=mmap, verify=verify)
        names = None
        if stored.name_offsets is not None and stored.name_bytes is not None:
            names = Names(stored.name_bytes, stored.name_offsets)
        trie = cls(
            stored.token,
            stored.first_child,
            stored.leaf,
            stored.depth,
            stored.tail,
            stored.n_leaves,
            stored.max_token,
            {path: root for root, path in enumerate(stored.paths)},
            stored.n_names,
            names,
            stored.collided,
            stored.target,
            stored.sole_leaf,
            stored.healed,
            stored.n_healed,
            stored.model_id,
            is_verified,
        )
        try:
            if is_verified:
                trie.validate()
            trie._require_beginnings()
        except TrieSamplerError as error:
            raise TrieFileError(f"{os.fspath(file)!r} is no trie that can be loaded: {error}") from None
        return trie

    def _require_beginnings(self) -> None:
        """Refuse a root without children: an armed native sampler would leave llama.cpp no candidate, which aborts."""
        for root in self._roots.values():
            if not len(self.children(root)):
                raise TrieSamplerError("damaged trie: 'every root has children' does not hold")

    def _require_sound(self) -> None:
        """Check a file's content, if that was not done, before a query that goes through it all. O(S), once."""
        if not self._is_sound:
            self.validate()
            # The one thing about a trie that changes is what is known of it.
            object.__setattr__(self, "_is_sound", True)

    # --- asking it -----------------------------------------------------------------------------

    @property
    def roots(self) -> dict[str, int]:
        """Descriptor path -> root node; a trie without descriptors has the path ``""``."""
        return dict(self._roots)

    @property
    def paths(self) -> tuple[str, ...]:
        """The descriptors' paths, in the payload's order."""
        return tuple(self._roots)

    @property
    def root(self) -> int:
        """The root node of the only descriptor.

        Raises:
            UnknownPathError: there are several; see ``roots``.
        """
        if len(self._roots) > 1:
            raise UnknownPathError(f"the trie has several roots; take one of {list(self._roots)}")
        return 0

    def root_of(self, path: str) -> int:
        """The root node of a descriptor.

        Raises:
            UnknownPathError: there is none of that path; the message lists the paths.
        """
        if path not in self._roots:
            raise UnknownPathError(_unknown_path(path, list(self._roots)))
        return self._roots[path]

    @property
    def n_nodes(self) -> int:
        """S, roots included."""
        return len(self.leaf)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; the names are not counted."""
        arrays = (self.token, self.first_child, self.leaf, self.target, self.sole_leaf)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def nbytes_of_names(self) -> int:
        """Bytes of the names, one blob and offsets."""
        return 0 if self._names is None else len(self._names.blob) + self._names.offsets.nbytes

    def step(self, node: int, token: int) -> int:
        """The node that ``token`` leads to from ``node``, or -1. O(log K)."""
        self._check_node(node)
        if not 0 <= token <= np.iinfo(TOKEN).max:
            return -1
        edge = int(find_child_of(self.token, self.first_child, node, token))
        end = edge if edge < 0 else self._end_of(edge)
        return end if 0 <= end < self.n_nodes else -1

    def children(self, node: int) -> npt.NDArray[np.int32]:
        """[K] int32 view: the tokens that may follow at ``node``, ascending."""
        self._check_node(node)
        return self.token[self._edges_of(node)]

    def _edges_of(self, node: int) -> slice:
        """The edges to a node's children; clamped as in the kernels, for a damaged file may say anything."""
        start = max(0, int(self.first_child[node]))
        stop = min(len(self.token), int(self.first_child[node + 1]), start + self.max_token + 1)
        return slice(start, max(start, stop))

    def is_terminal(self, node: int) -> bool:
        """Whether a leaf ends at ``node``; it may go on as another."""
        self._check_node(node)
        return bool(self.leaf[node] != NO_LEAF)

    def leaf_name(self, node: int) -> str | None:
        """Name of the leaf that ends at ``node``, ``None`` where none does.

        Raises:
            TrieSamplerError: a damaged file names no leaf there.
        """
        self._check_node(node)
        leaf = int(self.leaf[node])
        if not NO_LEAF <= leaf < self._n_names:
            raise TrieSamplerError("damaged trie: 'leaf indices are in range' does not hold")
        return None if leaf == NO_LEAF else self.name_of(leaf)

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The tokens from the root to ``node``. O(D log S); in a graph one of the ways there, O(D E)."""
        self._check_node(node)
        tokens: list[int] = []
        while node >= len(self._roots):
            # An edge is found from the nodes before it: that of the first one is the longest piece.
            edge = node if self.target is None else int(np.argmax(self.target == node))
            tokens.append(int(self.token[edge]))
            # An index of the array's own type: with another NumPy copies the array first.
            parent = int(np.searchsorted(self.first_child, NODE.type(edge), side="right")) - 1
            if not 0 <= parent < node:
                raise TrieSamplerError("damaged trie: 'children come after parents' does not hold")
            node = parent
        return tuple(reversed(tokens))

    def leaves(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """All (name, tokens) that can come out, in node order; in a graph one path for each leaf end.

        O(S D log S), in a graph O(S D E): for small tries.
        """
        self._require_sound()
        for node in np.flatnonzero(self.leaf != NO_LEAF):
            yield self.name_of(int(self.leaf[node])), self.path_tokens(int(node))

    @property
    def collisions(self) -> tuple[Collision, ...]:
        """Names that share their tokens with a smaller name and lost that path to it."""
        self._require_sound()
        return tuple(
            Collision(self.name_of(int(self.leaf[node])), self.name_of(int(leaf)), self.path_tokens(int(node)))
            for node, leaf in self._collided.T
        )

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Names that lost every path to smaller names, and can never come out."""
        self._require_sound()
        kept = np.zeros(self._n_names, bool)
        kept[self.leaf[self.leaf != NO_LEAF]] = True
        lost = dict.fromkeys(int(leaf) for leaf in self._collided[1] if not kept[leaf])
        return tuple(map(self.name_of, lost))

    def tell_unreachable(self) -> str:
        """A sentence about ``unreachable``."""
        shown = some([f"{name!r:.80}" for name in self.unreachable])
        return f"choices that can never come out, for others have the same text: {shown}"

    def name_of(self, leaf: int) -> str:
        """The name of a leaf by its index.

        Raises:
            IndexError: there is no such leaf.
            TrieSamplerError: its name is no text, in a damaged file.
        """
        if not 0 <= leaf < self._n_names:
            raise IndexError(f"leaf {leaf} is not in 0 .. {self._n_names - 1}")
        return str(leaf) if self._names is None else self._names[leaf]

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.n_nodes:
            raise IndexError(f"node {node} is not in 0 .. {self.n_nodes - 1}")

    # --- checking it ---------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every structural promise of the arrays. O(S).

        Raises:
            TrieSamplerError: one does not hold; the message says which.
        """
        first, n_nodes, n_roots = self.first_child, self.n_nodes, len(self._roots)
        if len(first) != n_nodes + 1:
            raise TrieSamplerError("damaged trie: 'first_child has S+1 entries' does not hold")
        is_tree = self.target is None
        n_edges, n_before = len(self.token), n_roots if is_tree else 0
        if is_tree and n_edges != n_nodes:
            raise TrieSamplerError("damaged trie: 'token has S entries' does not hold")
        inner = np.ones(n_edges, bool)
        # Siblings ascend: only a family's first member may have a smaller token than its neighbour.
        inner[: min(n_before, n_edges)] = False
        inner[first[:-1][(first[:-1] >= 0) & (first[:-1] < n_edges)]] = False
        n_names, (places, losers) = self._n_names, self._collided
        ends_at = places[(places >= 0) & (places < n_nodes)]
        checks = {
            "roots come first": self.target is not None or bool(np.all(self.token[:n_roots] == NO_TOKEN)),
            "every edge has a target": self.target is None or len(self.target) == n_edges,
            "children follow the roots": first[0] == n_before and first[-1] == n_edges,
            # Compared, for the difference of two int32 may wrap.
            "first_child ascends": bool(np.all(first[1:] >= first[:-1])),
        }
        if all(checks.values()):
            nodes = np.arange(n_nodes, dtype=NODE)
            if self.target is None:
                # The first child has the smallest number.
                checks["children come after parents"] = bool(np.all((first[:-1] > nodes) | (first[:-1] == first[1:])))
            else:
                parents = np.repeat(nodes, np.diff(first))
                checks["children come after parents"] = bool(np.all(self.target > parents))
                checks["targets are nodes"] = bool(np.all(self.target < n_nodes))
        checks |= {
            "tokens are ids": bool(np.all(self.token[n_before:] >= 0)),
            "max_token is the largest": int(self.token.max(initial=0)) == self.max_token,
            "siblings ascend": bool(np.all((self.token[1:] > self.token[:-1]) | ~inner[1:])),
            "leaf indices are in range": bool(np.all((self.leaf >= -1) & (self.leaf < n_names))),
            "sole leaves are in range": self.sole_leaf is None
            or bool(np.all((self.sole_leaf >= -1) & (self.sole_leaf < n_names))),
            "collisions are of leaves": len(ends_at) == len(places)
            and bool(np.all(self.leaf[ends_at] >= 0) and np.all((losers >= 0) & (losers < n_names))),
            "every branch ends in a leaf": bool(np.all((np.diff(first) > 0) | (self.leaf >= 0))),
            "names are text": self._names is None or self._names.are_text(),
        }
        for promise, holds in checks.items():
            if not holds:
                raise TrieSamplerError(f"damaged trie: {promise!r} does not hold")

    def check_vocab(self, vocab: Llama | Tokenizer, *, strict: bool = False) -> None:
        """Check that the paths belong to a vocabulary.

        Doubtful, a warning: it was spelled by another vocabulary; leaves (of 64 looked at) that do not
        spell their names; every leaf begins with a control token, as where a tokenizer added BOS.
        A warning in any case: some leaves begin with a space that their name has not, and some do not.

        Args:
            vocab: the vocabulary at hand.
            strict: raise where it is doubtful.

        Raises:
            VocabMismatchError: an id >= V, an end-of-generation id inside a leaf, or, under ``strict``,
                what is doubtful.
            TrieSamplerError: damaged; looked for where it comes from a file that was not verified.
        """
        vocab = as_tokenizer(vocab)
        self._require_sound()
        if self.max_token >= vocab.n_vocab:
            self._refuse_edge(int(np.argmax(self.token >= vocab.n_vocab)), f"V is {vocab.n_vocab}")
        for token in np.unique(self.token[self.token != NO_TOKEN]).tolist():
            if vocab.is_eog(token):
                self._refuse_edge(int(np.argmax(self.token == token)), "it ends the generation")
        theirs = getattr(vocab, "fingerprint", None)
        if self.model_id is not None and self.model_id == theirs:
            return
        sample = list(self._sample_leaves(vocab))
        doubts = self._find_doubts(vocab, sample)
        if self.model_id is not None and theirs is not None:
            doubts = [f"the trie was made with another vocabulary: {self.model_id}, not {theirs}"]
        for doubt in doubts:
            if strict:
                raise VocabMismatchError(doubt)
            warn(doubt)
        if not doubts:
            self._report_mixed_leads(sample)

    def _find_doubts(self, vocab: Tokenizer, sample: Sequence[tuple[str, str]]) -> list[str]:
        """What speaks against leaves that come as ids, in sentences."""
        wrong = [f"{name!r:.80} is spelled {text!r:.80} here" for name, text in sample if not _is_spelled(name, text)]
        if not wrong:
            return []
        firsts = {int(token) for root in self._roots.values() for token in self.children(root)}
        if all(map(vocab.is_control, firsts)):
            bos = min(firsts)
            return [f"every leaf begins with control token {bos}, as if a tokenizer added BOS; tokenize without it"]
        return [f"leaves that do not spell their names, perhaps of another model: {some(wrong)}"]

    def _report_mixed_leads(self, sample: Sequence[tuple[str, str]]) -> None:
        """Warn where the model would weigh tokens of two kinds; leaves with several paths mean it so."""
        if np.count_nonzero(self.leaf != NO_LEAF) != self.n_leaves:
            return
        spaced = [repr(name) for name, text in sample if text == f" {name}"]
        plain = [repr(name) for name, text in sample if text == name]
        if spaced and plain:
            warn(f"some leaves begin with a space ({some(spaced)}) and some do not ({some(plain)})")

    def _sample_leaves(self, vocab: Tokenizer) -> Iterator[tuple[str, str]]:
        """(name, text that its tokens spell) of 64 leaves spread over the trie."""
        terminals = np.flatnonzero(self.leaf != NO_LEAF)
        picked = terminals[np.linspace(0, len(terminals) - 1, _N_SAMPLED_LEAVES).astype(int)]
        for node in dict.fromkeys(picked.tolist()):
            tokens = self.path_tokens(node)
            # A control token is shown by its text, which may be the name.
            special = {"special": True} if any(map(vocab.is_control, tokens)) else {}
            yield self.name_of(int(self.leaf[node])), vocab.detokenize(tokens, **special).decode("utf-8", "replace")

    def _refuse_edge(self, edge: int, why: str) -> NoReturn:
        node = self._end_of(edge)
        parent = int(np.searchsorted(self.first_child, NODE.type(edge), side="right")) - 1
        place = len(self.path_tokens(parent))
        while self.leaf[node] == NO_LEAF:
            node = self._end_of(int(self.first_child[node]))
        raise VocabMismatchError(
            f"leaf {self.leaf_name(node)!r:.80}: token {self.token[edge]} at index {place} "
            f"cannot be part of a choice: {why}"
        )

    def _end_of(self, edge: int) -> int:
        return edge if self.target is None else int(self.target[edge])

    def __repr__(self) -> str:
        """Counts, not contents: a trie may hold millions of leaves."""
        roots = f", paths={list(self._roots)}" if self.paths != ("",) else ""
        return (
            f"TokenTrie(n_leaves={self.n_leaves}, n_nodes={self.n_nodes}, "
            f"depth={self.depth}, nbytes={self.nbytes}{roots})"
        )


def _settle_collisions(
    leaf: npt.NDArray[np.int32], collided: npt.NDArray[np.int32], names: Names
) -> npt.NDArray[np.int32]:
    """Give each shared terminal to the smallest name, in place; returns the (node, loser) pairs."""
    rivals: dict[int, set[int]] = {}
    for node, loser in collided.T.tolist():
        rivals.setdefault(node, {int(leaf[node])}).add(loser)
    settled = []
    for node, leaves in rivals.items():
        winner, *losers = sorted(leaves, key=names.__getitem__)
        leaf[node] = winner
        settled += [(node, loser) for loser in losers]
    return np.array(settled, LEAF).T


def _is_spelled(name: str, text: str) -> bool:
    """Whether a text is a name, as it stands or as a JSON value; surrounding space and case do not matter."""
    quoted = json.dumps(name, ensure_ascii=False)
    return any(text.strip().casefold() == form.strip().casefold() for form in (name, quoted, quoted[1:]))


def as_tokenizer(llm: Llama | Tokenizer) -> Tokenizer:
    """The vocabulary of a ``Llama``; the adapter is loaded only where one is at hand."""
    if "llama_cpp" not in sys.modules and isinstance(llm, Tokenizer):
        return llm
    from trie_sampler.llama.vocab import as_tokenizer as adapt

    return adapt(llm)


def _compare_model_ids(found: str, wanted: str | None, vocab: Tokenizer | None, *, strict: bool) -> None:
    """Tell a payload of another model by its id, where that says something."""
    if wanted is None and found.startswith(FINGERPRINT_FORM):
        wanted = getattr(vocab, "fingerprint", None)
    if wanted is None or found == wanted:
        return
    message = f"the payload is of model {found!r}, not of {wanted!r}"
    if strict:
        raise VocabMismatchError(message)
    warn(message)


def _unknown_path(path: str, known: Sequence[str]) -> str:
    return f"there is no descriptor {path!r:.80}; the paths are {some([repr(k) for k in known])}"
