"""Model families: one file each, and the registry. To add a family, add a file here and an entry in `FAMILIES`."""

from collections.abc import Mapping

from mtjax.config.families.bert import BERT
from mtjax.config.families.family import Family
from mtjax.config.families.gpt import GPT
from mtjax.config.families.llama import LLAMA
from mtjax.config.families.t5 import T5

FAMILIES: Mapping[str, Family] = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "t5": T5}
"""Name -> the family's defaults and checks. `Model.family` takes its choices from here."""


def settings_of_others(name: str) -> frozenset[str]:
    """Returns the settings that have no effect in a family, because only other families use them."""
    return frozenset().union(*(family.own for family in FAMILIES.values())) - FAMILIES[name].own
