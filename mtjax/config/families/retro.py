"""Retro (arXiv 2112.04426): a GPT that also reads neighbours, texts like the chunk before, which a search found."""

from mtjax.config.families.family import RETRO, Family
from mtjax.config.families.gpt import GPT
from mtjax.config.retro import check_retro

RETRO_FAMILY = Family(
    kind="retrieval",
    defaults=GPT.defaults,
    choices={"position": ("learned",), "norm_placement": ("pre",), "head": ("language",)},
    own=RETRO,
    check=check_retro,
)
