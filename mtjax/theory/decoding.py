"""What a step of decoding sends: a token of every sequence is read, and the next one drawn where its logits are.

Over the model ways a layer sends what its sublayers' forward passes send (Figure 4 of arXiv 1909.08053), for one token
of a sequence; sampling sends a few numbers of each. Nothing crosses `data`, and nothing is as long as the vocabulary.
"""

from collections.abc import Iterator

from mtjax.config.sizes import padded_vocab_size
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.contract import EMBEDDING_FORWARD, LAYER_FORWARD, SAMPLING, Contract, Expectation, Symbols
from mtjax.theory.mesh import MeshShape
from mtjax.theory.parts.part import over_model

REPORTED = 20
"""Most likely tokens that come with their log-probabilities."""
THRESHOLD_BITS = 32
"""Of a float32: a threshold of top-k or top-p is found by one sum for each."""


def decoding_contract(anatomy: Anatomy) -> Contract:
    """What the step sends that sends most: some sequence draws, with top-k and top-p, and wants log-probabilities."""
    (sublayers,) = {len(stack.parts) for stack in anatomy.decoder_stacks}
    stream = "sequences*hidden"
    lines = (
        over_model(EMBEDDING_FORWARD, "all-reduce", "1", stream, "rows of the newest tokens"),
        over_model(LAYER_FORWARD, "all-reduce", f"{sublayers}*layers", stream, "g behind each sublayer"),
        *_sampling(),
    )
    return Contract("decoding", lines)


def _sampling() -> Iterator[Expectation]:
    def line(count: str, elements: str, dtype: str, why: str) -> Expectation:
        return over_model(SAMPLING, "all-reduce", count, elements, why, dtype=dtype)

    why = "highest scores: greedy, before drawing and drawn; sums for top-p, one a bit; log-probabilities"
    yield line(f"3 + 1 + {THRESHOLD_BITS} + 2", "sequences", "float32", why)
    yield line(f"2 + {THRESHOLD_BITS}", "sequences", "int32", "whose the highest are; counts, one a bit for top-k")
    yield line("1", "sequences*reported*model_ways", "float32", "the most likely of each rank")
    yield line("1", "sequences*reported*model_ways", "int32", "which tokens these are")


def decoding_symbols(anatomy: Anatomy, sequences: int, mesh: MeshShape) -> Symbols:
    """The words of the contract's formulas."""
    ways = mesh.model
    return {
        "sequences": sequences,
        "hidden": anatomy.model.hidden_size,
        "layers": sum(stack.layers for stack in anatomy.decoder_stacks),
        "model_ways": ways,
        "reported": min(REPORTED, padded_vocab_size(anatomy.model) // ways),
    }
