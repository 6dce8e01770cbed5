"""What BERT and T5 send beside, or instead of, what a layout's contract says of a pre-LN decoder."""

import dataclasses

from mtjax.config import Config
from mtjax.sharding.contract import (
    EMBEDDING_BACKWARD,
    EMBEDDING_FORWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_RECOMPUTE,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    OTHER,
    Contract,
    Expectation,
    contract_of,
)
from mtjax.theory.layout import Layout
from mtjax.theory.rules import MODEL

_DECODER_AGAIN = "(2*decoder_again + decoder_nested)*m"
"""Sums of layers that are computed again: two of a layer's three; all in a group, whose next layer needs the last."""


def contract_of_run(config: Config, layout: Layout) -> Contract:
    """The contract of a config's family in a layout."""
    kinds = {"bert": _bert, "t5": _t5}
    contract = contract_of(layout)
    family = config.model.family
    return kinds[family](contract, config, layout) if family in kinds else contract


def _bert(contract: Contract, config: Config, layout: Layout) -> Contract:
    """The loss of the masked tokens alone; two all-reduces of a post-LN layer computed again."""
    lines = [line for line in contract.lines if line.phase not in (LOSS_FORWARD, LOSS_BACKWARD)]
    why = "max, sum, target logit of the masked tokens"
    lines.append(Expectation(LOSS_FORWARD, "all-reduce", MODEL, "(3+smoothing)*m", "b*M", "float32", why=why))
    why = "gradient of the masked tokens' hidden states"
    lines.append(Expectation(LOSS_BACKWARD, "all-reduce", MODEL, "m", "b*M*h", why=why))
    if layout.sequence:
        why = "hidden states of the masked tokens and of the first, from all parts of the sequence"
        elements = f"b*(M + {int(config.model.sentence_order)})*h"
        lines.append(Expectation(LOSS_FORWARD, "all-reduce", MODEL, "m", elements, pooled=True, why=why))
        lines = _with_own_sums(lines, f"{config.model.num_token_types}*h", "and of token types")
    if config.model.norm_placement == "post":
        why = "g after attention and, for the norm behind it, after the MLP, again"
        lines = [
            dataclasses.replace(line, count="2*again*m", why=why)
            if line.phase == LAYER_RECOMPUTE and line.kind != "all-gather"
            else line
            for line in lines
        ]
    return dataclasses.replace(contract, name=f"bert, {contract.name}", lines=tuple(lines))


def _with_own_sums(lines: list[Expectation], elements: str, why: str) -> list[Expectation]:
    """`lines` with more elements in the sums over `model` of gradients of which each rank saw its own tokens."""
    return [
        dataclasses.replace(line, elements=f"{line.elements} + {elements}", why=f"{line.why}, {why}")
        if line.hoisted and line.axis == MODEL
        else line
        for line in lines
    ]


def _t5(contract: Contract, config: Config, layout: Layout) -> Contract:
    """The encoder's lines, and a decoder's of L layers, d tokens and three sublayers each."""
    decoder = _split_decoder() if layout.sequence else _decoder()
    loss = Expectation(
        LOSS_FORWARD, "all-reduce", MODEL, "(3+smoothing)*m", "b*d", "float32", why="max, sum, target logit"
    )
    encoder = [line for line in contract.lines if line.phase not in (LOSS_FORWARD, LOSS_BACKWARD)]
    if layout.sequence:
        encoder = _with_own_sums(encoder, "3*L*(n + c)*h + n*h", "in both stacks")
    else:  # nothing stands between the rows of both sides, and the compiler may send them as one
        encoder = [
            dataclasses.replace(line, pooled=True, also=LOSS_FORWARD) if line.phase == EMBEDDING_FORWARD else line
            for line in encoder
        ]
    # The decoder's come first: where both have arrays of one size, theirs are the smaller counts.
    return dataclasses.replace(contract, name=f"t5, {contract.name}", lines=(*decoder, loss, *encoder))


def _decoder() -> list[Expectation]:
    again = "g after attention and cross-attention, again; in a group after the MLP too"
    return [
        Expectation(
            EMBEDDING_FORWARD,
            "all-reduce",
            MODEL,
            "m",
            "b*d*h",
            pooled=True,
            also=LOSS_FORWARD,
            why="the decoder's rows",
        ),
        Expectation(LAYER_FORWARD, "all-reduce", MODEL, "3*L*m", "b*d*h", why="g after each of three sublayers"),
        Expectation(LAYER_RECOMPUTE, "all-reduce", MODEL, _DECODER_AGAIN, "b*d*h", why=again),
        Expectation(LAYER_BACKWARD, "all-reduce", MODEL, "3*L*m", "b*d*h", why="f before each of three sublayers"),
        Expectation(
            LAYER_BACKWARD,
            "all-reduce",
            MODEL,
            "L",
            "m*b*s*h",
            pooled=True,
            hoisted=True,
            why="f of what cross-attention reads, in each layer or once for their sum",
        ),
        Expectation(LOSS_BACKWARD, "all-reduce", MODEL, "m", "b*d*h", why="gradient of the hidden states"),
    ]


def _split_decoder() -> list[Expectation]:
    """With both sequences split: what cross-attention reads is gathered, and its gradient scattered, layer by layer."""

    def line(phase: str, kind: str, count: str, elements: str, why: str, also: str = "") -> Expectation:
        return Expectation(phase, kind, MODEL, count, elements, also=also, why=why)

    lines = [
        line(EMBEDDING_FORWARD, "reduce-scatter", "m", "b*d*h", "the decoder's rows"),
        line(LAYER_FORWARD, "all-gather", "3*L*m", "b*d*h", "before each of three sublayers"),
        line(LAYER_FORWARD, "reduce-scatter", "3*L*m", "b*d*h", "after each of three sublayers"),
        line(LOSS_FORWARD, "all-gather", "m", "b*d*h", "hidden states of whole sequences", LOSS_BACKWARD),
        line(LOSS_BACKWARD, "reduce-scatter", "m", "b*d*h", "gradient of the hidden states"),
        line(LAYER_RECOMPUTE, "all-gather", "3*(L+decoder_nested)*m", "b*d*h", "again: the split ones are kept"),
        line(LAYER_RECOMPUTE, "all-gather", "(L-decoder_nested)*m", "b*s*h", "what cross-attention reads, again"),
        line(LAYER_RECOMPUTE, "reduce-scatter", _DECODER_AGAIN, "b*d*h", "after attention and cross-attention, again"),
        line(LAYER_BACKWARD, "all-gather", "3*L*m", "b*d*h", "gradients of what was scattered"),
        line(LAYER_BACKWARD, "reduce-scatter", "3*L*m", "b*d*h", "gradients of what was gathered"),
        line(LAYER_BACKWARD, "reduce-scatter", "L*m", "b*s*h", "gradient of what cross-attention reads"),
        line(EMBEDDING_BACKWARD, "all-gather", "m", "b*d*h", "gradient of what was scattered"),
        line(EMBEDDING_BACKWARD, "all-gather", "p*m", "d*h", "gradient of the positions"),
    ]
    read = [
        line(LAYER_FORWARD, "all-gather", "L", "m*b*s*h", "what cross-attention reads, in each layer or once", OTHER),
        line(
            LAYER_RECOMPUTE,
            "all-gather",
            "2*decoder_nested",
            "m*b*s*h",
            "again, twice a layer or once a group",
        ),
    ]
    return [*lines, *(dataclasses.replace(line, pooled=True, hoisted=True) for line in read)]
