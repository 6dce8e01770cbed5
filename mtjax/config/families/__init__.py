"""Model families: one file each, and the registry. To add a family, add a file here and an entry in `FAMILIES`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mtjax.config.families.bert import BERT
from mtjax.config.families.family import DECODER, ENCODER, HYBRID, RETRO, Family
from mtjax.config.families.gpt import GPT
from mtjax.config.families.hybrid import HYBRID_FAMILY
from mtjax.config.families.llama import LLAMA
from mtjax.config.families.retro import RETRO_FAMILY
from mtjax.config.families.t5 import T5
from mtjax.errors import UserError, listed

if TYPE_CHECKING:
    from mtjax.config.model import Model

FAMILIES: Mapping[str, Family] = {
    "gpt": GPT,
    "llama": LLAMA,
    "hybrid": HYBRID_FAMILY,
    "bert": BERT,
    "t5": T5,
    "retro": RETRO_FAMILY,
}
"""Name -> the family's defaults and checks. `Model.family` takes its choices from here."""


def kind_of(model: "Model") -> str:
    """Returns `decoder`, `encoder`, `encoder-decoder` or `retrieval`."""
    return FAMILIES[model.family].kind


def is_decoder(model: "Model") -> bool:
    """Returns whether a model continues a text: whether it has causal layers alone."""
    return kind_of(model) == "decoder"


def check_decoder_settings(model: "Model") -> None:
    """Checks that settings of decoders, hybrid models or encoders alone have their defaults in other families.

    Raises:
      UserError: one has another value; names it.
    """
    for name in sorted((DECODER | HYBRID | ENCODER | RETRO) - FAMILIES[model.family].own):
        if getattr(model, name) != getattr(type(model)(), name):
            known = [family for family, row in FAMILIES.items() if name in row.own]
            works = f"the famil{'ies' if known[1:] else 'y'} {listed(known)}"
            raise UserError(f"{name} only works with {works}, and family is {model.family}: remove {name}")


def settings_of_others(name: str) -> frozenset[str]:
    """Returns the settings that have no effect in a family, because only other families use them."""
    return frozenset().union(*(family.own for family in FAMILIES.values())) - FAMILIES[name].own
