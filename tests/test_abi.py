"""What compiled code believes of the host's memory, against the installed host and against doctored ones."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

llama_cpp = pytest.importorskip("llama_cpp")

from trie_sampler import layout  # noqa: E402
from trie_sampler.errors import EngineError  # noqa: E402
from trie_sampler.llama import sampler as sampler_module  # noqa: E402
from trie_sampler.llama.abi import check_abi  # noqa: E402

SLOTS = ("name", "accept", "apply", "reset", "clone", "free")
STRUCTURES = ("llama_token_data", "llama_token_data_array", "llama_sampler", "llama_sampler_i")


def structure(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def host(**changes: Any) -> SimpleNamespace:
    """The installed host with some structures exchanged; None takes one out."""
    kept = {name: getattr(llama_cpp, name) for name in STRUCTURES} | {"__version__": "9.8.7"} | changes
    return SimpleNamespace(**{name: value for name, value in kept.items() if value is not None})


def test_the_installed_host_fits() -> None:
    check_abi()
    check_abi(host())


def test_slots_exist_by_name() -> None:
    """L1: the table is taken from the host and its slots are set by name, each with the host's own type."""
    fields = dict(llama_cpp.llama_sampler_i._fields_)
    for slot in SLOTS:
        assert fields[slot] is getattr(llama_cpp, f"llama_sampler_i_{slot}")


def test_a_record_is_three_words_with_the_logit_second() -> None:
    """L15."""
    record = llama_cpp.llama_token_data
    assert ctypes.sizeof(record) == 12
    assert [(name, getattr(record, name).offset, getattr(record, name).size) for name in ("id", "logit", "p")] == [
        ("id", 0, 4),
        ("logit", 4, 4),
        ("p", 8, 4),
    ]
    # Kernels read it as words: id at 3 t, logit at 3 t + 1.
    records = (record * 2)((1, 0.5, 0.25), (7, -2.0, 0.125))
    words = np.frombuffer(records, np.int32)
    assert words[[0, 3]].tolist() == [1, 7]
    assert np.frombuffer(records, np.float32)[[1, 4]].tolist() == [0.5, -2.0]


def test_a_native_record_begins_with_a_cursor_record() -> None:
    """Cursor kernels take its address."""
    assert layout.CURSOR.names
    assert layout.CURSOR.fields
    assert layout.NATIVE.fields
    for name in layout.CURSOR.names:
        assert layout.NATIVE.fields[name] == layout.CURSOR.fields[name]
    assert layout.NATIVE.itemsize % 8 == 0


F, ID, P = ctypes.c_float, ctypes.c_int32, ctypes.c_void_p

#  what is wrong                host                                                        what the message names
DOCTORED = [
    ("logit and p exchanged",
     {"llama_token_data": structure("llama_token_data", [("id", ID), ("p", F), ("logit", F)])},
     ["llama_token_data.logit is at 8, not 4", "llama_token_data.p is at 4, not 8"]),
    ("id of 64 bits",
     {"llama_token_data": structure("llama_token_data", [("id", ctypes.c_int64), ("logit", F), ("p", F)])},
     ["llama_token_data.logit is at 8, not 4", "llama_token_data.p is at 12, not 8",
      "llama_token_data has 16 bytes, not 12"]),
    ("one field more",
     {"llama_token_data": structure("llama_token_data", [("id", ID), ("logit", F), ("p", F), ("q", F)])},
     ["llama_token_data has 16 bytes, not 12"]),
    ("no logit",
     {"llama_token_data": structure("llama_token_data", [("id", ID), ("score", F), ("p", F)])},
     ["llama_token_data.logit is at None, not 4"]),
    ("no selected",
     {"llama_token_data_array": structure(
         "llama_token_data_array", [("data", P), ("size", ctypes.c_size_t), ("sorted", ctypes.c_bool)])},
     ["llama_token_data_array.selected is at None, not 16", "llama_token_data_array.sorted is at 16, not 24",
      "llama_token_data_array has 24 bytes, not 32"]),
    ("ctx before iface",
     {"llama_sampler": structure("llama_sampler", [("ctx", P), ("iface", P)])},
     ["llama_sampler.iface is at 8, not 0", "llama_sampler.ctx is at 0, not 8"]),
    ("structure missing", {"llama_token_data_array": None}, ["llama_token_data_array is missing"]),
    ("table missing", {"llama_sampler_i": None}, [f"llama_sampler_i.{slot} is missing" for slot in SLOTS]),
    *(
        (f"slot {gone} missing",
         {"llama_sampler_i": structure("llama_sampler_i", [(slot, P) for slot in SLOTS if slot != gone])},
         [f"llama_sampler_i.{gone} is missing"])
        for gone in SLOTS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), [row[1:] for row in DOCTORED], ids=[row[0] for row in DOCTORED])
def test_a_host_that_does_not_fit_is_named(changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(EngineError) as raised:
        check_abi(host(**changes))
    message = str(raised.value)
    assert "llama-cpp-python 9.8.7" in message
    assert "TrieLogitsProcessor works without it" in message
    for problem in named:
        assert problem in message
    n_problems = message.partition("(")[2].partition(")")[0].count(";") + 1
    assert n_problems == len(named)


def test_no_sampler_is_made_on_a_host_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """Found when the first sampler is made, before anything is compiled; no later call finds half a table."""

    def refuse() -> None:
        raise EngineError("does not fit")

    monkeypatch.setattr(sampler_module, "check_abi", refuse)
    monkeypatch.setattr(sampler_module, "_tables", None)
    payload = '{"modelId": "m", "descriptors": [{"path": "a", "leaves": [{"name": "a", "tokens": [%d]}]}]}'
    (token,) = tiny.tokenize(b"a", add_bos=False)
    for _ in range(2):
        with pytest.raises(EngineError, match="does not fit"):
            sampler_module.llama_sampler_init_token_trie(
                llama_cpp.llama_model_get_vocab(tiny.model), payload % token, 0
            )
    assert sampler_module.n_alive() == 0
