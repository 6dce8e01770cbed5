"""Kinds of values of config.json beside the annotations of transformers' configs."""

import typing

import pytest

from mtjax.convert.model_types.registry import MODEL_TYPES
from mtjax.convert.model_types.value_kinds import KINDS, LISTS

torch = pytest.importorskip("torch")
auto = pytest.importorskip("transformers.models.auto.configuration_auto")

ANOTHER = {"mpt": {"logit_scale"}}
"""Keys of which mtjax supports fewer values than transformers, in any kind."""
EXAMPLES = {"str": ("L", "auto"), "list": ([1], ["full_attention"])}
"""Values of kinds that most keys don't have, of which one must be accepted where the annotation has this kind."""


def _members(annotation: object) -> set[str]:
    """Returns the names of the types of which an annotation is the union."""
    found = typing.get_args(annotation) if "|" in str(annotation) or "Optional" in str(annotation) else (annotation,)
    return {getattr(typing.get_origin(each) or each, "__name__", "") for each in found}


def _refused(kind: str) -> list[str]:
    """Returns the keys of a type that may be a string or a list in transformers alone."""
    described, hints = MODEL_TYPES[kind], typing.get_type_hints(auto.CONFIG_MAPPING[kind], localns={"torch": torch})
    kinds = {**KINDS, **LISTS, **described.kinds}
    read = {*described.keys, *described.more_keys, *(each.theirs for each in described.fields)}
    keys = {name: described.aliases.get(name, name) for name in hints}
    return [
        f"{name}: {hints[name]}"
        for name, key in keys.items()
        if key in read and key in kinds and key not in ANOTHER.get(kind, ())
        for member in _members(hints[name]) & EXAMPLES.keys()
        if not (member == "list" and key in LISTS) and not any(kinds[key][1](value) for value in EXAMPLES[member])
    ]


@pytest.mark.torch
def test_what_transformers_allows_is_a_kind_that_mtjax_reads() -> None:
    refused = {kind: _refused(kind) for kind in MODEL_TYPES if kind in auto.CONFIG_MAPPING}
    assert {kind: keys for kind, keys in refused.items() if keys} == {}
