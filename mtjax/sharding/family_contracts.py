"""What BERT and T5 send beside, or instead of, what a layout's contract says of a pre-LN decoder."""

import dataclasses

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.sharding.axes import MODEL
from mtjax.sharding.contract import (
    EMBEDDING_FORWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_RECOMPUTE,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    Contract,
    Expectation,
    contract_of,
)
from mtjax.sharding.layouts import Layout


def contract_of_run(config: Config, layout: Layout) -> Contract:
    """The contract of a config's family in a layout.

    Raises:
      UserError: none is declared.
    """
    kinds = {"bert": _bert, "t5": _t5}
    contract = contract_of(layout)
    family = config.model.family
    return kinds[family](contract, config, layout) if family in kinds else contract


def _bert(contract: Contract, config: Config, layout: Layout) -> Contract:
    """Two all-reduces of a post-LN layer computed again; with split sequences, gradients of the masked-LM head."""
    lines = contract.lines
    if config.model.norm_placement == "post" and config.training.recompute == "full":
        kind = "reduce-scatter" if layout.sequence else "all-reduce"
        why = "g after the MLP, again: the norm behind it needs it"
        lines += (Expectation(LAYER_RECOMPUTE, kind, MODEL, "l*m", "b*s*h", why=why),)
    if layout.sequence:
        own = f"h*h + {3 + config.model.num_token_types}*h"
        why = "and those of the masked-LM head and of token types"
        lines = tuple(
            dataclasses.replace(line, elements=f"{line.elements} + {own}", why=f"{line.why}, {why}")
            if line.hoisted and line.axis == MODEL
            else line
            for line in lines
        )
    return dataclasses.replace(contract, name=f"bert, {contract.name}", lines=lines)


def _t5(contract: Contract, config: Config, layout: Layout) -> Contract:
    """The encoder's lines, and a decoder's of L layers, d tokens and three sublayers each."""
    if layout.sequence:
        raise UserError("no communication contract is declared for a T5 whose sequences are split")
    # The decoder's come first: where both have arrays of one size, theirs are the smaller counts.
    lines = [
        Expectation(EMBEDDING_FORWARD, "all-reduce", MODEL, "m", "b*d*h", why="the decoder's rows"),
        Expectation(LAYER_FORWARD, "all-reduce", MODEL, "3*L*m", "b*d*h", why="g after each of three sublayers"),
        Expectation(LAYER_BACKWARD, "all-reduce", MODEL, "3*L*m", "b*d*h", why="f before each of three sublayers"),
        Expectation(LAYER_BACKWARD, "all-reduce", MODEL, "L*m", "b*s*h", why="f of what cross-attention reads"),
        Expectation(LOSS_BACKWARD, "all-reduce", MODEL, "m", "b*d*h", why="gradient of the hidden states"),
        Expectation(
            LOSS_FORWARD, "all-reduce", MODEL, "(3+smoothing)*m", "b*d", "float32", why="max, sum, target logit"
        ),
    ]
    if config.training.recompute == "full":
        why = "g after attention and cross-attention, again"
        lines.append(Expectation(LAYER_RECOMPUTE, "all-reduce", MODEL, "2*L*m", "b*d*h", why=why))
    encoder = (line for line in contract.lines if line.phase not in (LOSS_FORWARD, LOSS_BACKWARD))
    return dataclasses.replace(contract, name=f"t5, {contract.name}", lines=(*lines, *encoder))
