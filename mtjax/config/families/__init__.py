"""The families: one file each, and the registry. A new family is a file here and a line in `FAMILIES`."""

from collections.abc import Mapping

from mtjax.config.families.bert import BERT
from mtjax.config.families.family import Family
from mtjax.config.families.gpt import GPT
from mtjax.config.families.llama import LLAMA
from mtjax.config.families.t5 import T5

FAMILIES: Mapping[str, Family] = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "t5": T5}
"""Name -> what the config knows about the family. `Model.family` takes its choices from here."""


def settings_of_others(name: str) -> frozenset[str]:
    """Settings that have no effect in a family, because they are other families' own."""
    return frozenset().union(*(family.own for family in FAMILIES.values())) - FAMILIES[name].own
