"""Sampling parameters to a sampler chain of llama.cpp, with the trie in one of two documented places.

The reference is ``common_sampler_init`` of llama.cpp's ``common/sampling.cpp``; its parameters and defaults are
those of ``common_params_sampling`` in ``common/common.h``.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, cast

import llama_cpp
from llama_cpp import Llama
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from trie_sampler import kernels
from trie_sampler.cache import TrieCache
from trie_sampler.cursor import TrieCursor, as_mode
from trie_sampler.errors import EngineError, TrieSamplerError, TrieSamplerWarning, VocabMismatchError
from trie_sampler.gbnf import check_grammar
from trie_sampler.llama.sampler import new_sampler
from trie_sampler.llama.vocab import LlamaTokenizer, as_tokenizer
from trie_sampler.trie import TokenTrie

_DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_SAMPLERS = (*_DEFAULT_SAMPLERS, "infill", "adaptive_p")
# They change logits; all others take candidates away, scale or select.
_SHAPERS = ("penalties", "dry")
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p", "typicalp": "typ_p"}
_BY_SQUEEZED_NAME = {name.replace("_", ""): name for name in _SAMPLERS} | _ALIASES

# A penalty window is allocated up front, 4 bytes a token.
_LONGEST_WINDOW = 1_000_000
_FLOAT_MAX = 3.4e38
_INT_MAX = 2**31 - 1
_MIROSTAT_M = 100

_Count = Annotated[int, Field(strict=True, ge=0, le=_INT_MAX)]
_Window = Annotated[int, Field(strict=True, ge=0, le=_LONGEST_WINDOW)]
_Float = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
_Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0.0, le=_FLOAT_MAX)]
_Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]
_Token = Annotated[int, Field(strict=True, ge=0, le=_INT_MAX)]


class SamplingParams(BaseModel):
    """llama.cpp's common sampling parameters and defaults, with the trie's beside them.

    Frozen. A value of another type or outside its range is a ``pydantic.ValidationError`` (a ``ValueError``) that
    names the field; an unknown keyword is a ``TypeError``.

    Attributes:
        seed: of the draws of dist, xtc, adaptive-p and mirostat; -1 or 4294967295 takes a random one.
        n_prev: taken for the sake of parameter sets written for llama.cpp; a chain keeps no history beyond
            ``penalty_last_n`` and ``dry_penalty_last_n``.
        n_probs: filters leave at least so many candidates (as ``min_keep``).
        min_keep: filters leave at least so many candidates; 0 sets no limit.
        top_k: keep the k likeliest; <= 0 keeps all.
        top_p: keep the fewest whose mass reaches it; 1 keeps all.
        min_p: drop those below this share of the likeliest; 0 keeps all.
        xtc_probability, xtc_threshold: how often to drop all but the least likely of the candidates above the
            threshold; probability 0 or threshold > 0.5 never.
        typ_p: locally typical sampling; 1 keeps all.
        temp: divides the logits; <= 0 leaves the likeliest alone.
        dynatemp_range, dynatemp_exponent: temperature by entropy, ``temp`` +- range; range 0 is off.
        penalty_last_n: accepted tokens that the penalties look back on; 0 is off.
        penalty_repeat: divides positive, multiplies other logits of repeated tokens; > 0, 1 is off.
        penalty_freq, penalty_present: taken off a repeated token's logit, per count and once.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n: penalty for a token that goes on with a
            repetition; multiplier 0 is off.
        dry_sequence_breakers: texts that a repetition does not reach across.
        adaptive_target, adaptive_decay: of the selector adaptive-p, chosen by "adaptive_p" in ``samplers``; the
            target is a probability, below 0 it is a plain draw.
        mirostat: 1 or 2 selects by mirostat; then ``samplers`` counts for the penalties only, and ``temp`` is applied.
        mirostat_tau, mirostat_eta: target surprise in bits, and learning rate.
        top_n_sigma: keep logits within n standard deviations of the largest; <= 0 is off.
        ignore_eos: bias every end-of-generation token to -inf.
        logit_bias: token id -> what is added to its logit; -inf bans it.
        no_perf: do not measure times.
        samplers: names, in the order they act; llama.cpp's spellings ("top_k", "top-k", "topk", "nucleus", ...).
        grammar: GBNF with a rule ``root``; ``None`` or "" is none. What llama.cpp's parser would not survive
            is refused: parentheses 1,000 deep, 20,000 rules, groups and repetitions, ``{m,n}`` with n < m.
        grammar_lazy: the grammar waits for a trigger.
        grammar_triggers: texts and token ids that wake a lazy grammar. Texts are taken literally: llama.cpp also takes
            regular expressions, but ends the process over one that it cannot compile.
        token_trie_descriptor_json: a ``TokenTreePayload`` as JSON; "" is no trie.
        token_trie_mode: 0 or "greedy", 1 or "sampled". Without a trie it has no meaning.
        trie_position: "first" or "after_temperature", see ``build_sampler_chain``.
        path, on_end, stop_tokens, on_invalid, max_span_tokens: see ``llama_sampler_init_token_trie``. "mask" leaves V
            candidates, so that every sampler behind costs O(V), and those that count the candidates or weigh their
            entropy (typ_p, dynatemp, min_keep) count the masked ones.

    Example:
        >>> SamplingParams(temp=0.2, token_trie_mode=1).token_trie_mode
        'sampled'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: Annotated[int, Field(strict=True, ge=-1, le=2**32 - 1)] = llama_cpp.LLAMA_DEFAULT_SEED
    n_prev: _Count = 64
    n_probs: _Count = 0
    min_keep: _Count = 0
    top_k: Annotated[int, Field(strict=True, ge=-_INT_MAX, le=_INT_MAX)] = 40
    top_p: _Share = 0.95
    min_p: _Share = 0.05
    xtc_probability: _Share = 0.0
    xtc_threshold: _Share = 0.1
    typ_p: _Share = 1.0
    temp: _Float = 0.8
    dynatemp_range: _Positive = 0.0
    dynatemp_exponent: _Positive = 1.0
    penalty_last_n: _Window = 64
    # The reciprocal must be finite in float32 too.
    penalty_repeat: Annotated[float, Field(strict=True, ge=1e-30, le=1e30)] = 1.0
    penalty_freq: _Float = 0.0
    penalty_present: _Float = 0.0
    dry_multiplier: _Positive = 0.0
    dry_base: _Positive = 1.75
    dry_allowed_length: _Count = 2
    dry_penalty_last_n: _Window = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    adaptive_target: Annotated[float, Field(strict=True, ge=-1.0, le=1.0)] = -1.0
    adaptive_decay: Annotated[float, Field(strict=True, ge=0.0, le=0.99)] = 0.9
    mirostat: Literal[0, 1, 2] = 0
    mirostat_tau: _Positive = 5.0
    mirostat_eta: _Positive = 0.1
    top_n_sigma: _Float = -1.0
    ignore_eos: bool = False
    logit_bias: dict[int, Annotated[float, Field(strict=True)]] = Field(default_factory=dict)
    no_perf: bool = False
    samplers: tuple[str, ...] = _DEFAULT_SAMPLERS
    grammar: str | None = None
    grammar_lazy: bool = False
    grammar_triggers: tuple[_Token | str, ...] = ()
    token_trie_descriptor_json: str = ""
    token_trie_mode: Annotated[Literal["greedy", "sampled"], BeforeValidator(as_mode)] = "greedy"  # noqa: S105
    trie_position: Literal["first", "after_temperature"] = "first"
    path: str | None = None
    on_end: Literal["mass", "eog", "release"] = "release"
    stop_tokens: tuple[_Token, ...] = ()
    on_invalid: Literal["drop", "mask"] = "drop"
    max_span_tokens: Annotated[int, Field(strict=True, ge=1)] = 500

    def __init__(self, /, **data: Any) -> None:
        unknown = sorted(data.keys() - type(self).model_fields.keys())
        if unknown:
            raise TypeError(f"SamplingParams: unexpected keyword {', '.join(map(repr, unknown))}")
        super().__init__(**data)

    @field_validator("samplers", mode="before")
    @classmethod
    def _spell_samplers(cls, names: Any) -> Any:
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"a list of sampler names is expected, got {names!r}")
        found = [_BY_SQUEEZED_NAME.get(re.sub("[-_]", "", name.lower())) for name in names]
        unknown = [name for name, known in zip(names, found, strict=True) if known is None]
        if unknown:
            raise ValueError(f"unknown samplers {unknown}; known are {list(_SAMPLERS)}")
        return tuple(found)

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, biases: dict[int, float]) -> dict[int, float]:
        for token, bias in biases.items():
            if not -float("inf") <= bias <= _FLOAT_MAX:
                raise ValueError(f"the bias of token {token} must be a number or -inf, got {bias}")
        return biases

    @field_validator("dry_sequence_breakers", "grammar_triggers", "grammar")
    @classmethod
    def _check_texts(cls, value: Any) -> Any:
        # C strings end at the first NUL, and an empty trigger would match everywhere.
        for text in (value,) if isinstance(value, str) else value or ():
            if isinstance(text, str) and "\0" in text:
                raise ValueError(f"a NUL character cannot be passed to llama.cpp, got {text!r}")
            if text == "" and not isinstance(value, str):
                raise ValueError("an empty text cannot be a breaker or a trigger")
        return value

    @model_validator(mode="after")
    def _check_grammar(self) -> SamplingParams:
        check_grammar(self.grammar or "")
        if self.grammar and self.grammar_lazy and not self.grammar_triggers:
            raise ValueError("grammar_lazy: without grammar_triggers the grammar would never constrain")
        for name, is_on in {"infill": "infill" in self.samplers, "ignore_eos": self.ignore_eos}.items():
            if self.grammar and is_on:
                raise ValueError(f"{name} may leave only tokens that the grammar refuses, and llama.cpp aborts then")
        return self


def build_sampler_chain(model: Llama | Any, params: SamplingParams) -> Any:
    """Build the chain that ``llama_cpp.llama_sampler_sample`` takes.

    ==================  ========================================================================================
    ``trie_position``   order
    ==================  ========================================================================================
    first               **trie**, logit bias, ``samplers`` as listed, selector: filters act on the valid set and
                        can never empty it
    after_temperature   probe, logit bias, ``samplers`` as listed, **trie**, selector, as the reference has it: where
                        the filters took every valid token away, the trie puts back the one that was best in the raw
                        logits, which the probe saw (before any bias)
    no trie             grammar, logit bias, ``samplers`` as listed, selector
    ==================  ========================================================================================

    **Mode 0** has logit bias and penalties (also DRY) only, the greedy selector, and no filter or temperature: the
    pick is the largest logit of the valid set, after biases and penalties, ties to the lowest id, in both positions.
    The whole chain is greedy then, also while the trie is released. **Mode 1** selects by dist, or by adaptive-p or
    mirostat where they are asked for, from what is left.

    Two things could bring a token back that is no option: **infill**, which may leave an end-of-generation token that
    was no candidate, and biases that ban every option while ``on_invalid="mask"`` keeps the others in the array. Then
    "first" constrains in front (in the probe) and once more before the selector.

    **Who owns what.** The caller frees the chain with ``llama_cpp.llama_sampler_free``; samplers and trie go with it,
    and a clone is freed by itself. llama.cpp copies what is passed (biases, breakers, grammar); it keeps the pointer
    to the vocabulary, so the model must outlive the chain.

    **Accepting.** ``llama_sampler_sample`` accepts what it picked: do not accept it again. The trie walks with every
    accepted token. To show the prompt to the penalties, or to let a sampler of your own (a reasoning budget) force
    tokens that the trie does not have, release the trie first; it is at 0, or behind all but the selector::

        chain = build_sampler_chain(llm, params)
        trie = token_trie_handle(llama_cpp.llama_sampler_chain_get(chain, 0))
        trie.deactivate()
        for token in prompt:
            llama_cpp.llama_sampler_accept(chain, token)
        trie.activate()

    A grammar is what llama.cpp makes of it: where no token of the vocabulary continues it, the process ends.

    Args:
        model: a ``Llama``, or a ``llama_model *``.
        params: what to sample by.

    Returns:
        ``llama_sampler *`` of a chain.

    Raises:
        EngineError: a trie together with a grammar, for llama.cpp aborts the process where an accepted token does not
            fit the grammar; a grammar that does not parse (its log says where); a sampler that the installed
            llama-cpp-python lacks; ``on_end`` other than "release" for a vocabulary without end tokens.
        PayloadError, EmptyTrieError, UnknownPathError, VocabMismatchError: no trie can be built, and there is no
            grammar; a bias, a stop or a trigger is for a token that the vocabulary does not have.
        TypeError: not a model.

    Warns:
        TrieSamplerWarning: no trie can be built; the grammar constrains in its place.

    Cost: the payload's parsing and building. A step behind the trie costs O(K), in front of it O(V).
    """
    return _Builder(model, params).build()


def _samples(params: SamplingParams) -> bool:
    return params.token_trie_mode == "sampled"  # noqa: S105 - a mode, no password


def plan_chain(params: SamplingParams, *, has_trie: bool) -> list[str]:
    """The parts of the chain in order; "logit_bias" stands for itself even where there is none."""
    if has_trie and not _samples(params):
        middle, selector = [name for name in params.samplers if name in _SHAPERS], "greedy"
    elif params.mirostat:
        middle = [*(name for name in params.samplers if name in _SHAPERS), "plain_temperature"]
        selector = f"mirostat_{params.mirostat}"
    else:
        middle = [name for name in params.samplers if name != "adaptive_p"]
        selector = "adaptive_p" if "adaptive_p" in params.samplers else "dist"
    middle = ["logit_bias", *middle]
    if not has_trie:
        return [*(["grammar"] if params.grammar else []), *middle, selector]
    if params.trie_position == "after_temperature":
        return ["probe", *middle, "trie", selector]
    if "infill" in middle or params.on_invalid == "mask":
        return ["constraining_probe", *middle, "trie", selector]
    return ["trie", *middle, selector]


class _Builder:
    """One chain in the making: samplers made so far are freed where the next one fails."""

    def __init__(self, model: Llama | Any, params: SamplingParams) -> None:
        # A pointer does not say whether its vocabulary is the one that it was.
        self._is_bare = not isinstance(model, Llama)
        if isinstance(model, Llama):
            self._model: Any = model.model
            self._tokenizer = as_tokenizer(model)
        elif isinstance(model, (int, ctypes.c_void_p)) and not isinstance(model, bool) and model:
            self._model = model
            self._tokenizer = LlamaTokenizer.of_vocab(llama_cpp.llama_model_get_vocab(self._model))
        else:
            raise TypeError(f"expected a llama_cpp.Llama or a llama_model pointer, got {model!r}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._params = params
        self._made: list[Any] = []
        self._trie_sampler: Any = None

    def build(self) -> Any:
        params = self._params
        triggers = [token for token in params.grammar_triggers if not isinstance(token, str)]
        for field, tokens in {
            "logit_bias": params.logit_bias,
            "stop_tokens": params.stop_tokens,
            "grammar_triggers": triggers,
        }.items():
            check_tokens(field, tokens, self._tokenizer.n_vocab)
        self._cursor = cursor = self._make_cursor()
        if cursor is not None and params.grammar:
            raise EngineError(
                "a trie and a grammar cannot share a chain: llama.cpp aborts the process where an accepted token does "
                "not fit the grammar; leave one of them out"
            )
        plan = plan_chain(params, has_trie=cursor is not None)
        try:
            for part in plan:
                self._make(part)
        except BaseException:
            for sampler in [*self._made, self._trie_sampler]:
                llama_cpp.llama_sampler_free(sampler)
            raise
        chain_params = llama_cpp.llama_sampler_chain_default_params()
        chain_params.no_perf = params.no_perf
        chain = llama_cpp.llama_sampler_chain_init(chain_params)
        for sampler in self._made:
            llama_cpp.llama_sampler_chain_add(chain, sampler)
        return chain

    def _make_cursor(self) -> TrieCursor | None:
        params = self._params
        if not params.token_trie_descriptor_json:
            return None
        try:
            build = TokenTrie.from_payload if self._is_bare else TrieCache.shared().get
            trie = build(params.token_trie_descriptor_json, params.path, vocab=self._tokenizer)
        except TrieSamplerError as error:
            if not params.grammar:
                raise
            warnings.warn(
                f"no trie can be built ({error}); the grammar constrains in its place", TrieSamplerWarning, stacklevel=4
            )
            return None
        eog_ids = () if params.on_end == "release" else self._eog_ids()
        if params.on_end != "release" and not eog_ids and not params.stop_tokens:
            raise EngineError(
                f"on_end={params.on_end!r} ends with an end-of-generation token, and this vocabulary has none; "
                'give stop_tokens, or use on_end="release"'
            )
        return TrieCursor(
            trie,
            on_end=params.on_end,
            eog_ids=eog_ids,
            stop_tokens=params.stop_tokens,
            max_span_tokens=params.max_span_tokens,
        )

    def _eog_ids(self) -> tuple[int, ...]:
        if isinstance(self._tokenizer, LlamaTokenizer):
            return self._tokenizer.eog_ids
        return tuple(filter(self._tokenizer.is_eog, range(self._tokenizer.n_vocab)))

    # --- the parts -----------------------------------------------------------------------------

    def _make(self, part: str) -> None:
        params = self._params
        min_keep = max(params.min_keep, params.n_probs)
        makers: dict[str, Callable[[], Any]] = {
            "trie": self._take_trie,
            "probe": self._make_probe,
            "constraining_probe": self._make_constraining_probe,
            "grammar": self._make_grammar,
            "logit_bias": self._make_logit_bias,
            "penalties": self._make_penalties,
            "dry": self._make_dry,
            "top_n_sigma": lambda: init_sampler("top_n_sigma", params.top_n_sigma),
            "top_k": lambda: init_sampler("top_k", params.top_k),
            "typ_p": lambda: init_sampler("typical", params.typ_p, min_keep),
            "top_p": lambda: init_sampler("top_p", params.top_p, min_keep),
            "min_p": lambda: init_sampler("min_p", params.min_p, min_keep),
            "xtc": lambda: init_sampler("xtc", params.xtc_probability, params.xtc_threshold, min_keep, params.seed),
            "temperature": lambda: init_sampler(
                "temp_ext", params.temp, params.dynatemp_range, params.dynatemp_exponent
            ),
            "plain_temperature": lambda: init_sampler("temp", params.temp),
            "infill": lambda: init_sampler("infill", self._vocab),
            "greedy": lambda: init_sampler("greedy"),
            "dist": lambda: init_sampler("dist", params.seed),
            "adaptive_p": lambda: init_sampler(
                "adaptive_p", params.adaptive_target, params.adaptive_decay, params.seed
            ),
            "mirostat_1": lambda: init_sampler(
                "mirostat",
                self._tokenizer.n_vocab,
                params.seed,
                params.mirostat_tau,
                params.mirostat_eta,
                _MIROSTAT_M,
            ),
            "mirostat_2": lambda: init_sampler("mirostat_v2", params.seed, params.mirostat_tau, params.mirostat_eta),
        }
        sampler = makers[part]()
        if sampler is not None:
            self._made.append(sampler)

    def _new_trie(self, *, with_probe: bool) -> Any:
        # With the trie in front a bias or a penalty behind it may still flip the greedy pick.
        keeps_options = _samples(self._params) or self._params.trie_position == "first"
        cursor = cast("TrieCursor", self._cursor)
        self._trie_sampler, probe = new_sampler(
            cursor, keeps_options=keeps_options, on_invalid=self._params.on_invalid, with_probe=with_probe
        )
        return probe

    def _make_probe(self) -> Any:
        return self._new_trie(with_probe=True)

    def _make_constraining_probe(self) -> Any:
        probe = self._new_trie(with_probe=True)
        kernels.let_probe_constrain(int(probe.contents.ctx))
        return probe

    def _take_trie(self) -> Any:
        if self._trie_sampler is None:
            self._new_trie(with_probe=False)
        sampler, self._trie_sampler = self._trie_sampler, None
        return sampler

    def _make_grammar(self) -> Any:
        params = self._params
        text = (params.grammar or "").encode()
        if not params.grammar_lazy:
            return init_sampler("grammar", self._vocab, text, b"root")
        # llama.cpp's own escaping of a trigger word, ``regex_escape`` in ``common/common.cpp``.
        words = [re.sub(r"[.^$|()*+?\[\]{}\\]", r"\\\g<0>", t) for t in params.grammar_triggers if isinstance(t, str)]
        tokens = [t for t in params.grammar_triggers if not isinstance(t, str)]
        return init_sampler(
            "grammar_lazy_patterns",
            self._vocab,
            text,
            b"root",
            (ctypes.c_char_p * len(words))(*[word.encode() for word in words]),
            len(words),
            (llama_cpp.llama_token * len(tokens))(*tokens),
            len(tokens),
        )

    def _make_logit_bias(self) -> Any:
        biases = dict(self._params.logit_bias)
        biases |= dict.fromkeys(self._suppressed(), -float("inf"))
        if self._params.ignore_eos:
            biases |= dict.fromkeys(self._eog_ids(), -float("inf"))
        if not biases:
            return None
        array = (llama_cpp.llama_logit_bias * len(biases))(
            *(llama_cpp.llama_logit_bias(*pair) for pair in biases.items())
        )
        return init_sampler("logit_bias", self._tokenizer.n_vocab, len(biases), array)

    def _suppressed(self) -> list[int]:
        """Tokens that the model's file says never to sample, but for those of the trie."""
        get_tokens = getattr(llama_cpp, "llama_vocab_get_suppress_tokens", None)
        if get_tokens is None:
            return []
        n_tokens = ctypes.c_int32(0)
        tokens = get_tokens(self._vocab, ctypes.byref(n_tokens))
        suppressed = [int(tokens[i]) for i in range(n_tokens.value)]
        if self._cursor is None:
            return suppressed
        return [token for token in suppressed if not (self._cursor.trie.token == token).any()]

    def _make_penalties(self) -> Any:
        params = self._params
        numbers = (params.penalty_last_n, params.penalty_repeat, params.penalty_freq, params.penalty_present)
        # Older llama.cpp does not ask for the size of the vocabulary.
        takes_n_vocab = _n_arguments("penalties") == len(numbers) + 1
        return init_sampler("penalties", *([self._tokenizer.n_vocab] if takes_n_vocab else []), *numbers)

    def _make_dry(self) -> Any:
        params = self._params
        numbers = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_penalty_last_n)
        breakers = [text.encode() for text in params.dry_sequence_breakers]
        array = (ctypes.c_char_p * len(breakers))(*breakers)
        # Older llama.cpp asks for the training context, its limit of a window.
        takes_n_ctx = _n_arguments("dry") == len(numbers) + 4
        n_ctx = [llama_cpp.llama_model_n_ctx_train(self._model)] if takes_n_ctx else []
        return init_sampler("dry", self._vocab, *n_ctx, *numbers, array, len(breakers))


def check_tokens(field: str, tokens: Iterable[int], n_vocab: int) -> None:
    """Refuse ids that a vocabulary does not have.

    Raises:
        VocabMismatchError: names the field and the id.
    """
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise VocabMismatchError(f"{field}: token {token} is not in the vocabulary of {n_vocab} tokens")


def _function(name: str) -> Any:
    full_name = f"llama_sampler_init_{name}"
    function = getattr(llama_cpp, full_name, None)
    if function is None:
        version = getattr(llama_cpp, "__version__", "unknown")
        raise EngineError(f"llama-cpp-python {version} has no {full_name}; leave that sampler out, or update")
    return function


def _n_arguments(name: str) -> int:
    return len(_function(name).argtypes)


def init_sampler(name: str, *arguments: Any) -> Any:
    """``llama_sampler_init_NAME(*arguments)``; never NULL, for adding that to a chain kills the process.

    Raises:
        EngineError: the installed llama-cpp-python lacks it, or it made none.
    """
    sampler = _function(name)(*arguments)
    if not sampler:
        reason = "the grammar does not parse, llama.cpp's log says where" if "grammar" in name else "no reason given"
        raise EngineError(f"llama_sampler_init_{name} made no sampler: {reason}")
    return sampler
