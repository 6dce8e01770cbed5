"""Which snapshots of recurrent states are taken, kept and dropped: on a cache of numbers, without a model."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.generate.prefix_cache import PrefixCache
from mtjax.generate.request import Request
from mtjax.models.recurrent_state import RecurrentState
from tests.families.hybrid.test_model import SIZES
from tests.tiny import tiny_config

CHUNK = 4


class Slots:
    """A prefix cache whose states are the sums of their tokens."""

    def __init__(self, pattern: str, sequences: int, most: int | None = None) -> None:
        config = tiny_config(**SIZES, family="hybrid", layer_pattern=pattern, num_layers=len(pattern))
        decoder: Any = SimpleNamespace(config=config, is_encoder_decoder=False, call=lambda f, *given: f(*given))
        self.prefixes = PrefixCache(decoder, sequences, CHUNK, most)
        zeros = jnp.zeros((sequences, 1))
        self.cache = [{"mamba": RecurrentState(zeros, zeros, 64)}]
        self.free = list(range(sequences))

    def write(self, text: str) -> int:
        """Prefills a prompt chunk by chunk, and ends; returns how many of its tokens were reused."""
        prompt = tuple(map(ord, text))
        request, (state,) = Request(prompt), self.cache[0].values()
        slot = self.prefixes.best_slot(request, self.free, self.cache)
        self.cache, shared = self.prefixes.reuse(request, prompt, slot, self.cache)
        for start in range(shared, len(prompt), CHUNK):
            (state,) = self.cache[0].values()
            before = state.state[slot, 0] if start else 0
            assert before == sum(prompt[:start])
            count = min(start + CHUNK, len(prompt))
            values = state.state.at[slot, 0].set(before + sum(prompt[start:count]))
            self.cache = [{"mamba": state.of(state.taps, values)}]
            self.prefixes.prefilled(request, prompt, count, slot, self.cache)
        self.free.remove(slot)
        self.free.append(slot)
        return shared

    @property
    def texts(self) -> list[str]:
        """The texts of the slots, in their order."""
        return sorted("".join(map(chr, tokens)) for tokens in self.prefixes._tokens)

    @property
    def kept(self) -> list[str]:
        """The texts that have snapshots, in their order."""
        for snapshot in self.prefixes._snapshots:
            np.testing.assert_array_equal(snapshot.states[0][1], [[sum(snapshot.tokens)]])
        return sorted("".join(map(chr, snapshot.tokens)) for snapshot in self.prefixes._snapshots)


@pytest.mark.parametrize(("pattern", "reused"), [("M*", 0), ("M", 8)])
def test_snapshots_leave_with_the_keys_of_their_tokens(pattern: str, reused: int) -> None:
    """With attention a snapshot is of use only while a slot has the keys; a model without attention needs none."""
    slots = Slots(pattern, 1, 8)
    assert slots.write("abcdefghi") == 0 and slots.kept == ["abcd", "abcdefgh"]
    slots.write("12345")
    assert slots.kept == (["1234", "abcd", "abcdefgh"] if reused else ["1234"])
    assert slots.write("abcdefghi") == reused


def test_spare_snapshots_are_evicted_first() -> None:
    """Then the one that was not used for longest."""
    slots = Slots("M", 2, 3)
    slots.write("vwxyz")
    slots.write("abcdefghi")
    assert slots.kept == ["abcd", "abcdefgh", "vwxy"]
    slots.write("12345")
    assert slots.kept == ["1234", "abcdefgh", "vwxy"]
    assert slots.write("vwxy!") == 4
    slots.write("VWXYZ")
    assert slots.kept == ["1234", "VWXY", "vwxy"]
    assert slots.write("abcdef") == 0


@pytest.mark.parametrize(("most", "kept"), [(0, 0), (1, 1), (None, 6)])
def test_the_number_of_snapshots_is_limited(most: int | None, kept: int) -> None:
    slots = Slots("M*", 3, most)
    for text in ("abcdefghijklm", "nopqrstuvwxyz", "ABCDEFGHIJKLM", "NOPQRSTUVWXYZ"):
        slots.write(text)
        assert len(slots.kept) <= kept
    assert len(slots.kept) == kept


def test_where_prompts_depart_is_kept() -> None:
    """The second of the prompts with a system prompt leaves a snapshot at its end, also without room for others."""
    slots = Slots("M*", 3, 3)
    slots.write("nopqrstuvwxyz")
    slots.write("abcdefghijklm")
    assert "abcdefgh" not in slots.kept
    assert slots.write("abcdefgh12345") == 0 and "abcdefgh" in slots.kept
    assert slots.write("abcdefgh67890") == 8


def test_a_text_is_overwritten_by_what_continues_it() -> None:
    """Others that share its beginning copy that to the slot that has been free for longest."""
    slots = Slots("M*", 3, 9)
    slots.write("abcdefghi")
    assert slots.write("abcd1234") == slots.write("abcd5678") == 4
    assert slots.write("abcdefghijklm") == 8
    assert slots.texts == ["abcd1234", "abcd5678", "abcdefghijklm"]


def test_a_prompt_of_complete_chunks_continues_its_own_text() -> None:
    """It shares a chunk less than it has: its last token is never shared."""
    slots = Slots("M*", 3, 9)
    slots.write("12345678")
    slots.write("abcdefgh")
    assert slots.write("abcdefgh") == 4 and slots.texts == ["", "12345678", "abcdefgh"]
    # A prompt that leaves a text early, or is only its beginning, would lose the rest of it.
    assert slots.write("abcdXY") == 4 and slots.texts == ["12345678", "abcdXY", "abcdefgh"]


def test_the_beginning_of_a_text_does_not_overwrite_it() -> None:
    slots = Slots("M*", 2, 9)
    slots.write("abcdefghijklm")
    assert slots.write("abcdef") == 4 and slots.texts == ["abcdef", "abcdefghijklm"]


def test_a_shorter_cache_has_no_later_tokens() -> None:
    slots = Slots("M*", 1, 9)
    slots.write("abcdefghi")
    slots.prefixes.truncate(6)
    assert slots.kept == ["abcd"] and slots.write("abcdefghi") == 4
