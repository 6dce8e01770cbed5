"""Retro (arXiv 2112.04426): a GPT that also reads neighbours, texts like the chunk before, which a search found."""

from mtjax.config.families import RETRO, Family
from mtjax.config.retro import check_retro
from mtjax.families.gpt.config import GPT

RETRO_FAMILY = Family(
    kind="retrieval",
    defaults=GPT.defaults,
    choices={"position": ("learned",), "norm_placement": ("pre",), "head": ("language",)},
    own=RETRO,
    check=check_retro,
)
