"""``Decoder``: tokens on a live ``Llama``, decoded late and in few batches, whatever the context held before.

On the tiny model with a float32 key-value cache, where a row is the same to 1e-4 however its tokens were batched.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from spies import decodes, raw_row, text_of

from trie_sampler import EngineError, TrieSamplerError
from trie_sampler.llama.decoder import Decoder

if TYPE_CHECKING:
    from llama_cpp import Llama

IDS = [1, *range(300, 319)]
TOLERANCE = 1e-4


@contextlib.contextmanager
def loaded(path: Path, **settings: Any) -> Iterator[Llama]:
    from llama_cpp import Llama

    known = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "verbose": False}
    llm = Llama(str(path), **{**known, **settings})
    try:
        yield llm
    finally:
        llm.close()


def row_one_by_one(path: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The row after these tokens on a model of its own, one token a decode."""
    with loaded(path) as llm:
        for token in tokens:
            llm.eval([token])
        return raw_row(llm)


def assert_right(decoder: Decoder, llm: Llama, path: Path) -> None:
    np.testing.assert_allclose(decoder.row(), row_one_by_one(path, decoder.tokens), atol=TOLERANCE)
    assert llm.n_tokens == len(decoder.tokens)
    assert llm.input_ids[: llm.n_tokens].tolist() == decoder.tokens


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1], [5, 6, 7], [2, 19], list(range(1, 20))], ids=str)
def test_row_does_not_depend_on_the_batches(tiny: Llama, tiny_model_path: Path, cuts: list[int]) -> None:
    ends = [*cuts, len(IDS)]
    decoder = Decoder(tiny, IDS[: ends[0]])
    with decodes(tiny) as sizes:
        for start, end in zip(ends, [*ends[1:], None], strict=True):
            decoder.row()
            decoder.push(IDS[start:end])
    assert sizes == [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert_right(decoder, tiny, tiny_model_path)


def test_nothing_is_decoded_before_a_row_is_asked_for(tiny: Llama) -> None:
    with decodes(tiny) as sizes:
        decoder = Decoder(tiny, IDS)
        decoder.push([320])
        decoder.push([321, 322])
        decoder.push([])
        decoder.replace(IDS[:5])
        decoder.doubt()
        assert (sizes, decoder.n_decodes, decoder.time_of_first_row) == ([], 0, 0.0)
        decoder.row()
        assert sizes == [5]


def test_row_twice_costs_one_decode(tiny: Llama) -> None:
    decoder = Decoder(tiny, IDS)
    with decodes(tiny) as sizes:
        first = decoder.row()
        again = decoder.row()
    assert sizes == [20]
    assert first.dtype == np.float32
    assert first.shape == (tiny.n_vocab(),)
    assert np.array_equal(first, again)
    assert np.array_equal(first, raw_row(tiny))


def test_counts_begin_with_the_first_row(tiny_model_path: Path) -> None:
    with loaded(tiny_model_path, n_batch=8) as llm, decodes(llm) as sizes:
        decoder = Decoder(llm, IDS)
        decoder.row()
        assert sizes == [8, 8, 4]
        assert (decoder.n_decodes, decoder.n_prefill) == (3, 3)
        decoder.push([320])
        decoder.row()
        decoder.push(range(330, 340))
        decoder.row()
        assert sizes == [8, 8, 4, 1, 8, 2]
        assert (decoder.n_decodes, decoder.n_prefill) == (6, 3)
        decoder.restart_count()
        assert (decoder.n_decodes, decoder.n_prefill, decoder.time_of_first_row) == (0, 0, 0.0)
        decoder.row()
        assert (decoder.n_decodes, decoder.n_prefill) == (0, 0)
        assert decoder.time_of_first_row > 0
        assert_right(decoder, llm, tiny_model_path)


def test_rows_of_every_token_are_kept_where_the_host_keeps_them(tiny_model_path: Path) -> None:
    with loaded(tiny_model_path, logits_all=True) as llm:
        decoder = Decoder(llm, IDS)
        decoder.row()
        decoder.push([320, 321])
        assert_right(decoder, llm, tiny_model_path)
        np.testing.assert_allclose(llm.scores[19], row_one_by_one(tiny_model_path, IDS), atol=TOLERANCE)


# --- what the context held before -------------------------------------------------------------------------------------

OTHERS = [
    (IDS, [], "the same"),
    (IDS[:12], [8], "a beginning"),
    ([*IDS, 400, 401], [1], "a longer one"),
    ([*IDS[:7], 400, 401], [13], "one with the same beginning"),
    ([1, 500], [19], "another behind BOS"),
    ([500], [20], "nothing of it"),
]


@pytest.mark.parametrize(("before", "sizes"), [case[:2] for case in OTHERS], ids=[case[2] for case in OTHERS])
@pytest.mark.parametrize("by", ["eval", "replace"])
def test_only_what_differs_is_evaluated(
    tiny: Llama, tiny_model_path: Path, before: list[int], sizes: list[int], by: str
) -> None:
    decoder = Decoder(tiny, before)
    if by == "eval":
        tiny.eval(before)
    else:
        decoder.row()
    decoder.replace(IDS)
    with decodes(tiny) as spied:
        decoder.row()
    assert spied == (sizes or ([] if hasattr(tiny, "_requires_eval") else [1]))
    assert_right(decoder, tiny, tiny_model_path)


@pytest.mark.parametrize("before", [case[0] for case in OTHERS], ids=[case[2] for case in OTHERS])
def test_others_between_two_rows(tiny: Llama, tiny_model_path: Path, before: list[int]) -> None:
    decoder = Decoder(tiny, IDS)
    decoder.row()
    tiny.reset()  # type: ignore[no-untyped-call]
    tiny.eval(before)
    decoder.doubt()
    assert_right(decoder, tiny, tiny_model_path)
    decoder.push([400])
    tiny.reset()  # type: ignore[no-untyped-call]
    tiny.eval(before)
    decoder.doubt()
    assert_right(decoder, tiny, tiny_model_path)


def test_doubt_without_cause_costs_nothing(tiny: Llama) -> None:
    decoder = Decoder(tiny, IDS)
    decoder.row()
    with decodes(tiny) as sizes:
        decoder.doubt()
        decoder.row()
    assert sizes == []


def test_row_is_where_llama_cpp_has_it_now(tiny_model_path: Path) -> None:
    """With ``logits_all`` the buffer of rows grows with the largest batch, and moves."""
    import llama_cpp

    with loaded(tiny_model_path, logits_all=True) as llm:
        decoder = Decoder(llm, IDS)
        decoder.row()
        for n in (60, 120, 240):
            llm.reset()  # type: ignore[no-untyped-call]
            llm.eval([1] + [300] * n)
            llm.reset()  # type: ignore[no-untyped-call]
            llm.eval(IDS)
            decoder.doubt()
            address = ctypes.cast(llama_cpp.llama_get_logits_ith(llm.ctx, -1), ctypes.c_void_p).value
            assert decoder.row().ctypes.data == address


def test_two_decoders_in_turn(tiny: Llama, tiny_model_path: Path) -> None:
    first, second = Decoder(tiny, IDS), Decoder(tiny, [*IDS[:6], 500, 501])
    for token in range(600, 605):
        for decoder in (first, second):
            decoder.doubt()
            decoder.push([token])
            assert_right(decoder, tiny, tiny_model_path)


def test_free_completions_around_it(tiny: Llama, tiny_model_path: Path) -> None:
    def free(llm: Llama, prompt: Any) -> str:
        return text_of(llm.create_completion(prompt, temperature=0, max_tokens=8))

    prompts: list[Any] = ["action kind:", IDS, IDS[:9], [*IDS, 400]]
    with loaded(tiny_model_path) as fresh:
        refs = []
        for prompt in prompts:
            fresh.reset()  # type: ignore[no-untyped-call]
            refs.append(free(fresh, prompt))
    decoder = Decoder(tiny, IDS)
    for prompt, ref in zip(prompts, refs, strict=True):
        decoder.replace(IDS)
        decoder.row()
        assert free(tiny, prompt) == ref
        decoder.doubt()
        assert_right(decoder, tiny, tiny_model_path)


def test_memory_that_cannot_drop_a_tail(tiny: Llama, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As recurrent and hybrid models do it: a state, and no list of tokens to cut."""
    for module in ("llama_cpp", "llama_cpp.llama_cpp"):  # ours and the host's own
        monkeypatch.setattr(f"{module}.llama_memory_seq_rm", lambda *_: False)
    decoder = Decoder(tiny, [*IDS[:7], 500, 501])
    decoder.row()
    with decodes(tiny) as sizes:
        decoder.push([502])
        decoder.row()
        assert sizes == [1], "what only grows is not evaluated again"
        decoder.replace(IDS)
        decoder.row()
        assert sizes == [1, 20], "what branches is evaluated from the start"
        assert_right(decoder, tiny, tiny_model_path)
        decoder.replace(IDS[:9])
        assert_right(decoder, tiny, tiny_model_path)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, -1, -3])
def test_code_of_a_failed_decode(tiny: Llama, tiny_model_path: Path, code: int) -> None:
    decoder = Decoder(tiny, IDS)
    decoder.row()
    decoder.push([400, 401])

    def fail(_batch: Any) -> None:
        raise RuntimeError(f"llama_decode returned {code}")

    vars(tiny._ctx)["decode"] = fail
    for _ in range(2):
        with pytest.raises(EngineError, match="llama_decode failed") as caught:
            decoder.row()
        assert caught.value.code == code
    del vars(tiny._ctx)["decode"]
    assert_right(decoder, tiny, tiny_model_path)


def test_decode_that_fails_half_way(tiny_model_path: Path) -> None:
    with loaded(tiny_model_path, n_batch=8) as llm:
        decoder = Decoder(llm, IDS)
        decode, calls = llm._ctx.decode, iter(range(100))

        def fail_once(batch: Any) -> None:
            if next(calls) == 1:
                raise RuntimeError("llama_decode returned -3")
            decode(batch)

        vars(llm._ctx)["decode"] = fail_once
        with pytest.raises(EngineError):
            decoder.row()
        with decodes(llm) as sizes:
            decoder.row()
        assert sizes == [8, 4], "what the first batch did stays"
        assert_right(decoder, llm, tiny_model_path)


def test_interrupted_decode(tiny: Llama, tiny_model_path: Path) -> None:
    decoder = Decoder(tiny, IDS)

    def interrupt(_batch: Any) -> None:
        raise KeyboardInterrupt

    vars(tiny._ctx)["decode"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        decoder.row()
    del vars(tiny._ctx)["decode"]
    assert_right(decoder, tiny, tiny_model_path)


def test_more_tokens_than_the_context_has(tiny: Llama, tiny_model_path: Path) -> None:
    decoder = Decoder(tiny, [1] + [300] * 299)
    with pytest.raises(EngineError) as caught:
        decoder.row()
    assert caught.value.code
    decoder.replace(IDS)
    assert_right(decoder, tiny, tiny_model_path)


def test_room(tiny: Llama) -> None:
    decoder = Decoder(tiny, IDS)
    assert decoder.room == 256
    decoder.require_room(236, "text")
    with pytest.raises(EngineError, match=r"20 tokens of prompt and up to 237 of text .* 256; .*n_ctx=257"):
        decoder.require_room(237, "text")
    assert tiny.n_tokens == 0


def test_room_is_that_of_the_smaller_buffer(tiny_model_path: Path) -> None:
    """llama.cpp rounds a context up; the host's list of ids is what was asked for."""
    with loaded(tiny_model_path, n_ctx=40) as llm:
        decoder = Decoder(llm, [1] + [300] * 39)
        assert decoder.room == 40
        assert_right(decoder, llm, tiny_model_path)


def test_something_that_cannot_decode(tiny_model_path: Path) -> None:
    for llm in (None, "model.gguf", object()):
        with pytest.raises(TypeError, match="Llama"):
            Decoder(llm, IDS)  # type: ignore[arg-type]
    with loaded(tiny_model_path, vocab_only=True) as llm, pytest.raises(TrieSamplerError, match="vocab_only"):
        Decoder(llm, IDS)


def test_a_window_that_was_forgotten_is_evaluated_anew(gemma: Llama) -> None:
    """A cache without the full window cannot go back to before what left it; its rows would be wrong."""
    from llama_cpp import Llama

    llm = Llama(gemma.model_path, n_ctx=2048, n_threads=2, swa_full=False, verbose=False)
    long = list(range(2000, 3400))
    short = [*long[:700], 5, 6, 7]
    ref = Decoder(llm, short).row().copy()
    Decoder(llm, long).row()
    comp = Decoder(llm, short).row().copy()
    assert np.abs(ref - comp).max() < 1.0
    assert llm.n_tokens == len(short)
    llm.close()
