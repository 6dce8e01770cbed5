"""Contract of a decode step, which reads a token of every sequence and samples the next from sharded logits.

A layer has the forward all-reduces of its sublayers over the tensor parallel ranks (Figure 4 of arXiv 1909.08053), for
one token of each sequence; sampling sends a few numbers per sequence. Nothing crosses `data`, and no array is as long
as the vocabulary.
"""

from collections.abc import Iterator

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.contract import EMBEDDING_FORWARD, LAYER_FORWARD, SAMPLING, Contract, Expectation, Symbols
from mtjax.analysis.parts.part import over_model
from mtjax.analysis.parts.table_width import TABLE_WIDTH
from mtjax.config.sizes import embedding_width, padded_vocab_size
from mtjax.config.ssm import STATE_SPACE, numbers_of, ssm_groups
from mtjax.layout.layouts import layout_of
from mtjax.layout.mesh import MeshShape

REPORTED = 20
"""Most likely tokens that are returned with their log-probabilities."""
THRESHOLD_BITS = 32
"""Bits of a float32: the threshold of top-k or top-p is found by bisection, with one all-reduce per bit."""


def decoding_contract(anatomy: Anatomy) -> Contract:
    """Returns the contract of a decode step with all features of sampling: top-k, top-p and log-probabilities."""
    sizes = {_reduced(stack) for stack in anatomy.decoder_stacks}
    # Where layers differ the sum is a symbol of its own.
    sublayers = f"{sizes.pop()}*layers" if len(sizes) == 1 else "sublayers"
    stream, model = "sequences*hidden", anatomy.model
    rows = stream if embedding_width(model) == model.hidden_size else f"sequences*{TABLE_WIDTH}"
    sums = "sums of squares for the norms of queries and of keys over all heads"
    width_norms = (
        (over_model(LAYER_FORWARD, "all-reduce", "2*layers", "sequences", sums, dtype="float32"),)
        if model.qk_norm and model.qk_norm_scope == "width"
        else ()
    )
    squares = "squares of groups of heads that ranks share, for the gated norm of state-space layers"
    lines = (
        over_model(LAYER_FORWARD, "all-reduce", "sharing_layers", "sequences*groups", squares, dtype="float32"),
        over_model(EMBEDDING_FORWARD, "all-reduce", "1", rows, "embeddings of the newest tokens"),
        over_model(LAYER_FORWARD, "all-reduce", sublayers, stream, "g after each sublayer"),
        *width_norms,
        *_sampling(),
    )
    return Contract("decoding", lines)


def _reduced(stack: StackParts) -> int:
    """Returns the sublayers of a layer whose outputs the tensor parallel ranks add up."""
    return sum(part.reduces_output for part in stack.parts)


def _sampling() -> Iterator[Expectation]:
    """Yields the collectives of sampling."""

    def line(count: str, elements: str, dtype: str, why: str) -> Expectation:
        return over_model(SAMPLING, "all-reduce", count, elements, why, dtype=dtype)

    why = "maxima for greedy, for the softmax and of the sample; sums for top-p, one per bit; log-probabilities"
    yield line(f"3 + 1 + {THRESHOLD_BITS} + 2", "sequences", "float32", why)
    yield line(f"2 + {THRESHOLD_BITS}", "sequences", "int32", "tokens of the maxima; counts for top-k, one per bit")
    yield line("1", "sequences*reported*model_degree", "float32", "log-probabilities of each rank's most likely tokens")
    yield line("1", "sequences*reported*model_degree", "int32", "each rank's most likely tokens")


def decoding_symbols(anatomy: Anatomy, sequences: int, mesh: MeshShape) -> Symbols:
    """Returns the symbols of the contract's formulas."""
    degree, model = mesh.model, anatomy.model
    shares_groups = layout_of(model, mesh).rules.axes("groups") == ()
    return {
        "sharing_layers": len(numbers_of(model, STATE_SPACE)) if shares_groups and model.ssm_norm else 0,
        "sublayers": sum(_reduced(stack) * stack.layers for stack in anatomy.decoder_stacks),
        "groups": ssm_groups(model),
        "sequences": sequences,
        "hidden": model.hidden_size,
        TABLE_WIDTH: embedding_width(model),
        "layers": sum(stack.layers for stack in anatomy.decoder_stacks),
        "model_degree": degree,
        "reported": min(REPORTED, padded_vocab_size(anatomy.model) // degree),
    }
