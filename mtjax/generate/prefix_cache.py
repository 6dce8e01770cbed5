"""Prefix caching: prompts that begin like the text of a cache slot reuse what its layers keep of these tokens.

Keys and values of attention stay in the slots, where any number of tokens from the first can be reused. A recurrent
state cannot be taken back to an earlier token. So snapshots of the states of all layers are taken during prefill, and a
prompt begins from the longest of its prefixes that has a snapshot, and whose keys and values a slot has. Snapshots
follow their slots: one that no slot has the keys of is dropped.

The number of snapshots is limited. They are taken where later prompts are likely to continue: at the last complete
chunk of a prompt (a conversation goes on), and where a prompt departs from a slot's text (a system prompt ends). Others
are taken while there is space, and evicted first; then the one that was not used for longest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from mtjax.config.ssm import has_attention, has_state_space
from mtjax.config.storage import SNAPSHOTS_PER_SEQUENCE
from mtjax.generate.caches import Cache, keeps_prefix
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.request import Request
from mtjax.generate.sequence_copies import (
    States,
    copied,
    recurrent_states,
    restored,
    taken,
    with_recurrent_states,
)


@dataclass(eq=False)
class _Snapshot:
    """The recurrent states of all layers after some tokens."""

    tokens: tuple[int, ...]
    states: States
    is_spare: bool
    """Whether it was taken only because there was space, and has not been used."""
    used: int
    """Number of the event in which it was taken or last used."""
    slots: set[int] = field(default_factory=set)
    """The slots that begin with these tokens."""

    def __len__(self) -> int:
        return len(self.tokens)


class PrefixCache:
    """Knows the tokens of a cache's slots, and has snapshots of recurrent states.

    Args:
      decoder: the model.
      sequences: number of slots.
      chunk: longest chunk of a prompt in tokens. Prefixes of complete chunks are reused, so that the results are
        bit-identical to those of prefilling the prompt.
      most_snapshots: maximum number of snapshots; None for `SNAPSHOTS_PER_SEQUENCE` for each slot.

    Attributes:
      reused: total number of prompt tokens that were not prefilled.
    """

    def __init__(
        self, decoder: GenerationPrograms, sequences: int, chunk: int, most_snapshots: int | None = None
    ) -> None:
        model = decoder.config.model
        self._decoder, self._chunk, self._sequences = decoder, chunk, sequences
        self._has_states, self._has_attention = has_state_space(model), has_attention(model)
        self._most = SNAPSHOTS_PER_SEQUENCE * sequences if most_snapshots is None else most_snapshots
        # For each slot, the tokens whose keys and values are in the cache: what prompts are matched against.
        self._tokens: list[tuple[int, ...]] = [()] * sequences
        # And of how many tokens the keys were written, generated ones included: windows keep the last of them only.
        self._written = [0] * sequences
        # And where its prompt departs from the text of another slot.
        self._branch = [0] * sequences
        self._snapshots: list[_Snapshot] = []
        self._events = 0
        self.reused = 0

    def best_slot(self, request: Request, free: Sequence[int], cache: Cache | None) -> int:
        """Returns the free slot for a request: one whose text it continues, which then needs no copy.

        Otherwise it takes the slot with the shortest shared prefix, so that longer ones remain to be copied.
        """
        # Snapshots belong to no slot then, so every slot is as good.
        if not self._has_attention:
            return free[0]
        common = {slot: _common(request.prompt, self._tokens[slot]) for slot in free}
        shared = {slot: self._shared(request, slot, common[slot], cache) for slot in free}
        # The last token of a prompt is never shared, so a prompt of complete chunks shares one chunk less.
        whole = self._complete(len(request.prompt) - 1)
        complete = {slot: self._complete(len(self._tokens[slot])) for slot in free}
        continued = [
            slot
            for slot in free
            if 0 < shared[slot] == min(complete[slot], whole) and self._complete(common[slot]) == complete[slot]
        ]
        # `max` and `min` return the first of equals: the slot that has been free for longest.
        return max(continued, key=shared.__getitem__) if continued else min(free, key=shared.__getitem__)

    def reuse(self, request: Request, prompt: tuple[int, ...], slot: int, cache: Cache) -> tuple[Cache, int]:
        """Begins a prompt in a slot with the longest prefix that can be reused.

        Returns:
          The cache, which was donated if any tokens are reused, and their number.
        """
        # The slot itself comes first: `max` prefers it to equally long prefixes, and it needs no copy.
        slots = sorted(range(self._sequences), key=lambda other: other != slot) if self._has_attention else [slot]
        common = [_common(request.prompt, tokens) for tokens in self._tokens]
        lengths = {other: self._shared(request, other, common[other], cache) for other in slots}
        source = max(slots, key=lengths.__getitem__)
        shared = lengths[source]
        if self._has_states:
            # Where this prompt departs from all texts so far, the next one with the same system prompt probably will,
            # too.
            self._branch[slot] = self._complete(max(common))
        if shared and source != slot:
            # The whole slot is copied: what follows the prefix is overwritten by the prompt, or masked.
            cache = self._decoder.call(copied, cache, jnp.int32(source), jnp.int32(slot))
        if shared and self._has_states:
            cache = self._restored(request.prompt[:shared], slot, cache)
        # A copy has the same places of a window overwritten as its source.
        self._written[slot] = self._written[source] if shared else 0
        self._tokens[slot] = prompt[:shared]
        for snapshot in self._snapshots:
            snapshot.slots.discard(slot)
            if len(snapshot) <= shared and snapshot.tokens == prompt[: len(snapshot)]:
                snapshot.slots.add(slot)
        self._drop_unreachable()
        self.reused += shared
        return cache, shared

    def prefilled(self, request: Request, prompt: tuple[int, ...], count: int, slot: int, cache: Cache) -> None:
        """Notes that a slot has the first `count` tokens of a prompt, and takes a snapshot after complete chunks."""
        # Generated tokens are not matched: decode steps computed their keys, whose last bits may differ from prefill's.
        self._tokens[slot] = prompt[:count]
        self._written[slot] = max(self._written[slot], count)
        if self._has_states and self._most and not count % self._chunk and _may_reuse(request):
            is_spare = count not in (self._branch[slot], self._complete(len(prompt)), self._complete(len(prompt) - 1))
            self._take(prompt[:count], is_spare, slot, cache)

    def decoded(self, slot: int, length: int) -> None:
        """Notes that a slot has the keys and values of this many tokens, generated ones included."""
        self._written[slot] = max(self._written[slot], length)

    def truncate(self, length: int) -> None:
        """Notes that the cache keeps the first `length` tokens of each slot."""
        self._tokens = [tokens[:length] for tokens in self._tokens]
        for snapshot in self._snapshots:
            if len(snapshot) > length:
                # Their keys are cut off in all slots.
                snapshot.slots.clear()
        self._drop_unreachable()

    def _complete(self, tokens: int) -> int:
        """Returns the tokens of the complete chunks."""
        return tokens // self._chunk * self._chunk

    def _shared(self, request: Request, slot: int, common: int, cache: Cache | None) -> int:
        """Returns how many tokens of a prompt can be reused from a slot, which begins with `common` of them."""
        if cache is None or self._decoder.is_encoder_decoder or not _may_reuse(request):
            return 0
        # Never the last token, whose logits are needed.
        prompt, written, most = request.prompt, self._written[slot], len(request.prompt) - 1
        lengths: Iterable[int] = ()
        if not self._has_attention:
            snapshots = (each for each in self._snapshots if len(each) <= most)
            lengths = (len(each) for each in snapshots if prompt[: len(each)] == each.tokens)
        # Complete chunks, so that what is reused is bit-identical to what prefilling this prompt would compute.
        elif complete := self._complete(min(common, most)):
            snapshot_lengths = (len(each) for each in self._snapshots if slot in each.slots and len(each) <= complete)
            lengths = snapshot_lengths if self._has_states else (complete,)
        # Layers with a window may no longer have the last of these tokens.
        return max((length for length in lengths if keeps_prefix(cache, written, length)), default=0)

    # --- snapshots of recurrent states

    def _take(self, tokens: tuple[int, ...], is_spare: bool, slot: int, cache: Cache) -> None:
        """Takes a snapshot after these tokens of a slot, unless there is one, or space only for one that matters."""
        snapshot = self._snapshot_of(tokens)
        if snapshot is None and len(self._snapshots) >= self._most:
            if is_spare:
                return
            self._snapshots.remove(min(self._snapshots, key=lambda each: (not each.is_spare, each.used)))
        if snapshot is None:
            states = self._decoder.call(taken, recurrent_states(cache), jnp.int32(slot))
            snapshot = _Snapshot(tokens, states, is_spare, 0)
            self._snapshots.append(snapshot)
        snapshot.slots.add(slot)
        self._use(snapshot, is_spare)

    def _restored(self, tokens: tuple[int, ...], slot: int, cache: Cache) -> Cache:
        """Returns the cache with the states after these tokens in a slot."""
        snapshot = self._snapshot_of(tokens)
        assert snapshot is not None
        self._use(snapshot, is_spare=False)
        states = self._decoder.call(restored, recurrent_states(cache), snapshot.states, jnp.int32(slot))
        return with_recurrent_states(cache, states)

    def _snapshot_of(self, tokens: tuple[int, ...]) -> _Snapshot | None:
        return next((each for each in self._snapshots if each.tokens == tokens), None)

    def _use(self, snapshot: _Snapshot, is_spare: bool) -> None:
        self._events += 1
        snapshot.used, snapshot.is_spare = self._events, snapshot.is_spare and is_spare

    def _drop_unreachable(self) -> None:
        """Drops the snapshots of tokens whose keys and values no slot has; a model without any needs no slot."""
        if self._has_attention:
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.slots]


def _may_reuse(request: Request) -> bool:
    """Returns whether a request may begin after its first token."""
    # An echoed prompt's tokens need log-probabilities, and those of a repetition penalty must be counted.
    return not request.echo and request.sampling.repetition_penalty == 1


def _common(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the number of tokens with which both begin."""
    pairs = enumerate(zip(prompt, tokens, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(prompt), len(tokens)))
