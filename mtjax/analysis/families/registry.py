"""Family -> components of its models."""

from collections.abc import Callable
from functools import cache

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.families.bert import bert
from mtjax.analysis.families.decoder import decoder
from mtjax.analysis.families.hybrid import hybrid
from mtjax.analysis.families.retro import retro
from mtjax.analysis.families.t5 import t5
from mtjax.config import Model

FAMILIES: dict[str, Callable[[Model], Anatomy]] = {
    "gpt": decoder,
    "llama": decoder,
    "hybrid": hybrid,
    "bert": bert,
    "t5": t5,
    "retro": retro,
}


@cache
def anatomy_of(model: Model) -> Anatomy:
    """Returns the components of a model, by its family.

    Raises:
      UserError: the vocabulary's size is not known yet.
    """
    return FAMILIES[model.family](model)


def gpt(layers: int, hidden: int, heads: int, sequence: int, vocab: int, *, tied_embeddings: bool = True) -> Anatomy:
    """Returns a GPT-2 of these sizes, as tables of published runs give them; `vocab` is the padded size."""
    return anatomy_of(
        Model(
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            sequence_length=sequence,
            vocab_size=vocab,
            vocab_multiple=1,
            tie_embeddings=tied_embeddings,
        )
    )
