"""``native_sampling``: the native sampler in the chain that ``Llama`` builds, through every door of the host."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from actions import ACTIONS, REQUESTS

if TYPE_CHECKING:
    from llama_cpp import Llama

PROMPTS = ["Action:", "zzz", "What now? ", "REPLY or not:", "日本", "a b c d e f g h"]
CHOICES = ["REPLY", "REPLY_THREAD", "IGNORE", "red", "redwood", "PLAY_MUSIC"]
MESSAGES: Any = [{"role": "user", "content": "Which one?"}]

pytestmark = pytest.mark.filterwarnings("ignore:the prompt ends in:trie_sampler.TrieSamplerWarning")


def text_of(response: Any) -> str:
    choice = response["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def joined(chunks: Any) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def by_processor(llm: Llama, prompt: str, choices: Any = CHOICES) -> str:
    from trie_sampler import TrieLogitsProcessor

    constraint = TrieLogitsProcessor.from_choices(llm, choices)
    llm.create_completion(prompt, logits_processor=constraint, max_tokens=constraint.max_tokens)
    return constraint.result.text


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"temperature": 5.0, "repeat_penalty": 3.0}])
def test_greedy_gives_what_the_processor_gives(tiny: Llama, settings: dict[str, Any]) -> None:
    from trie_sampler import native_sampling

    for prompt in PROMPTS:
        ref = by_processor(tiny, prompt)
        with native_sampling(tiny, CHOICES) as native:
            response = tiny.create_completion(prompt, max_tokens=native.max_tokens, **settings)
            streamed = joined(tiny.create_completion(prompt, max_tokens=native.max_tokens, stream=True, **settings))
        assert text_of(response) == streamed == ref
        assert response["choices"][0]["finish_reason"] == "stop"
        assert native.handle is not None
        assert native.handle.leaf_name == ref.strip()


def test_real_models_agree_with_the_processor(llm: Llama) -> None:
    from trie_sampler import native_sampling

    requests = [request for of_action in REQUESTS.values() for request in of_action][::30]
    assert len(requests) == 20
    for request in requests:
        prompt = f"Actions: {', '.join(ACTIONS)}\nRequest: {request}\nAction:"
        llm.reset()  # the same batches for both: on a 4-bit model their shape moves logits by tenths
        ref = by_processor(llm, prompt, ACTIONS)
        llm.reset()
        with native_sampling(llm, ACTIONS) as native:
            assert text_of(llm.create_completion(prompt, max_tokens=native.max_tokens)) == ref


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 3.0},
        {"top_k": 1},
        {"min_p": 0.9},
        {"mirostat_mode": 1},
        {"mirostat_mode": 2},
        {"repeat_penalty": 2.0, "frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_sampled_output_is_always_a_choice(tiny: Llama, settings: dict[str, Any]) -> None:
    from trie_sampler import native_sampling

    names = set()
    for seed in range(12):
        with native_sampling(tiny, CHOICES, "sampled") as native:
            for prompt in PROMPTS:
                response = tiny.create_completion(prompt, max_tokens=native.max_tokens, seed=seed, **settings)
                names.add(text_of(response).strip())
    assert names <= set(CHOICES)
    assert len(names) > 1


def test_chat_and_bias(tiny: Llama) -> None:
    from trie_sampler import TokenTrie, native_sampling

    with native_sampling(tiny, CHOICES) as native:
        assert text_of(tiny.create_chat_completion(MESSAGES, max_tokens=native.max_tokens)).strip() in CHOICES
        free = text_of(tiny.create_completion("Action:", max_tokens=native.max_tokens)).strip()
        trie = TokenTrie.from_choices(tiny, CHOICES, prompt="Action:")
        moved = set()
        for token in trie.children(trie.root).tolist():
            response = tiny.create_completion("Action:", max_tokens=native.max_tokens, logit_bias={token: 100.0})
            moved.add(text_of(response).strip())
    assert moved <= set(CHOICES)
    assert moved > {free}


def test_a_completion_is_bound_when_it_is_called(tiny: Llama) -> None:
    from trie_sampler import native_sampling

    free = tiny.create_completion("Action:", max_tokens=6, temperature=0)["choices"][0]["text"]
    early = tiny.create_completion("Action:", max_tokens=6, temperature=0, stream=True)
    with native_sampling(tiny, CHOICES) as native:
        late = tiny.create_completion("Action:", max_tokens=native.max_tokens, stream=True)
        generated = tiny.generate(tiny.tokenize(b"Action:"), temp=0.0)
    assert joined(late).strip() in CHOICES
    assert next(generated) in [t for leaf in _trie(tiny).leaves() for t in leaf[1]]
    generated.close()
    assert joined(early) == free
    assert tiny.create_completion("Action:", max_tokens=6, temperature=0)["choices"][0]["text"] == free


def _trie(llm: Llama) -> Any:
    from trie_sampler import TokenTrie

    return TokenTrie.from_choices(llm, CHOICES, prompt="Action:")


@pytest.mark.parametrize("mode", [0, 1])
def test_a_draft_model_changes_nothing(tiny_model_path: Path, mode: int) -> None:
    """The prompt holds the choices, so that drafts are hit; the float32 cache makes batch shapes agree."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    from trie_sampler import native_sampling

    prompts = [f"{' '.join(CHOICES)} {' '.join(reversed(CHOICES))} {word}" for word in ("Action:", "so:", "x:")]
    texts: list[list[str]] = []
    for draft in (None, LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=6)):
        llm = Llama(
            str(tiny_model_path), n_ctx=256, n_threads=1, type_k=0, type_v=0, logits_all=True, verbose=False,
            draft_model=draft,
        )  # fmt: skip
        with native_sampling(llm, CHOICES, mode) as native:
            texts.append(
                [
                    text_of(llm.create_completion(prompt, max_tokens=native.max_tokens, seed=5)).strip()
                    for prompt in prompts
                ]
            )
        llm.close()
    assert set(texts[0]) | set(texts[1]) <= set(CHOICES)
    if mode == 0:
        assert texts[0] == texts[1]


def test_sources_and_paths(tiny: Llama) -> None:
    from trie_sampler import TokenTreePayload, UnknownPathError, native_sampling

    leaves = {name: tiny.tokenize(name.encode(), add_bos=False) for name in ("red", "yes", "true")}
    payload = TokenTreePayload(
        model_id="m",
        descriptors=tuple(
            {"path": path, "leaves": tuple({"name": name, "tokens": tuple(leaves[name])} for name in names)}
            for path, names in {"a": ["red", "yes"], "b": ["true"]}.items()
        ),
    )
    for source, path, names in ((payload, "b", {"true"}), (payload, "a", {"red", "yes"}), (_trie(tiny), None, CHOICES)):
        with native_sampling(tiny, source, path=path) as native:
            assert text_of(tiny.create_completion("Action:", max_tokens=native.max_tokens)).strip() in names
    with pytest.raises(UnknownPathError, match="'a', 'b'"), native_sampling(tiny, payload, path="nope"):
        pass


def test_release_lets_free_text_follow(tiny: Llama) -> None:
    from trie_sampler import native_sampling

    with native_sampling(tiny, ["PLAY_MUSIC"], on_end="release", lead=""):
        text = text_of(tiny.create_completion("x:", max_tokens=20, temperature=0))
    assert text.startswith("PLAY_MUSIC")
    assert len(text) > len("PLAY_MUSIC")


def test_refusals_leave_the_llama_as_it_was(tiny: Llama) -> None:
    from llama_cpp import LlamaGrammar

    from trie_sampler import EmptyTrieError, EngineError, native_sampling

    for source, settings, error in (
        ([], {}, EmptyTrieError),
        (CHOICES, {"mode": 2}, ValueError),
        (CHOICES, {"on_end": "stop"}, ValueError),
        (CHOICES, {"lead": "x"}, ValueError),
    ):
        with pytest.raises(error), native_sampling(tiny, source, **settings):  # type: ignore[arg-type]
            pass
    grammar = LlamaGrammar.from_string('root ::= "REPLY"', verbose=False)
    with native_sampling(tiny, CHOICES) as native:
        with pytest.raises(EngineError, match="grammar"):
            tiny.create_completion("x:", max_tokens=4, grammar=grammar)
        caught: list[BaseException] = []

        def other_thread() -> None:
            try:
                tiny.create_completion("x:", max_tokens=4)
            except EngineError as error:
                caught.append(error)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert "another thread" in str(caught[0])
        assert text_of(tiny.create_completion("x:", max_tokens=native.max_tokens)).strip() in CHOICES
    assert not {"generate", "_create_completion", "_init_sampler"} & vars(tiny).keys()
    assert tiny.create_completion("x:", max_tokens=4, grammar=grammar, temperature=0)["choices"][0]["text"] == "REPLY"
