"""Heads: the output projection with its loss, and those of BERT and of finetuning."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.contract import LOSS_BACKWARD, LOSS_FORWARD, PARAMETERS, Expectation
from mtjax.analysis.parts.part import (
    Part,
    Product,
    ResidualStream,
    Weight,
    linear,
    norm,
    over_model,
    weight,
    weights_of,
)
from mtjax.analysis.parts.sublayer import local_gradient_sums
from mtjax.config import Model
from mtjax.config.sizes import padded_vocab_size
from mtjax.layout.plan import Plan
from mtjax.layout.weights import head_products, output_weights


@dataclass(frozen=True)
class OutputProjectionPart(Part):
    """The output projection with vocabulary-parallel cross-entropy, of gathered sequences."""

    rows: int
    """Of the padded vocabulary."""
    hidden: int
    tokens: int
    """Tokens of a sample whose logits are computed."""
    owns_table: bool
    """False where it reads the embedding's table (tied)."""
    side: str = ""
    bias: bool = False
    """Whether there is a bias per row."""
    width: str = "hidden"
    """Symbol of `hidden`, the table's width."""

    @property
    def weights(self) -> list[Weight]:
        declared = output_weights(self.rows, self.hidden)
        has = {"output": self.owns_table, "output_bias": self.bias}
        return weights_of({name: sizes for name, sizes in declared.items() if has[name]})

    def products(self, tensor_degree: int = 1) -> list[Product]:
        return [Product(self.tokens, self.hidden, self.rows / tensor_degree)]

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the float32 logits of a loss chunk, with their gradients; with a teacher, its logits."""
        # JAX: gradients have the compute dtype and, without chunks, reuse the logits' memory; the table in the compute
        # dtype is alive too. Megatron: gradients are float32.
        rows = plan.local_tokens(self.tokens)
        tokens = min(rows, plan.loss_chunk or rows)
        columns = self.rows / plan.mesh.model
        if plan.residuals == "megatron":
            return 2 * 4 * tokens * columns
        gradients = plan.element_bytes * tokens * columns if tokens < rows else 0
        logits = (2 if plan.teacher_width else 1) * 4 * tokens * columns
        return logits + gradients + plan.element_bytes * columns * self.hidden

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        tokens = f"batch*{self.side}sequence"
        lines, elements = [_scalars(tokens, stream, "max, sum, target logit")], f"{tokens}*{self.width}"
        why = "gradient of the hidden states"
        if not stream.split:
            return [*lines, over_model(LOSS_BACKWARD, "all-reduce", stream.turns, elements, why)]
        gathered = "hidden states"
        return [
            *lines,
            over_model(LOSS_FORWARD, "all-gather", stream.turns, elements, gathered, also=LOSS_BACKWARD),
            over_model(LOSS_BACKWARD, "reduce-scatter", stream.turns, elements, why),
        ]


def teacher_table(model: Model, width: int) -> Weight:
    """Returns the output table of a teacher with hidden states of this width, which the distillation loss reads."""
    return weight("teacher.teacher_table", output_weights(padded_vocab_size(model), width)["output"])


def teacher_lines(ranks: str) -> list[Expectation]:
    """Returns what ZeRO-3 gathers of a teacher: a step reads only its output table, which never changes."""
    why = "a teacher's output table, for all microbatches"
    return [Expectation(PARAMETERS, "all-gather", ranks, "1", "teacher_table", "compute", pooled=True, why=why)]


@dataclass(frozen=True)
class MaskedOutputPart(OutputProjectionPart):
    """BERT's output: replicated dense layer, activation and norm, then logits of masked tokens only.

    `tokens` is the most that are masked in a sample.
    """

    sequence: int = 0
    """Tokens of a sample."""
    norm: tuple[str, ...] = ("scale", "bias")
    has_bias: bool = True
    """Of the dense layer."""
    takes_first: bool = True
    """Whether the head of the sentence order reads the first token's hidden state too."""

    @property
    def weights(self) -> list[Weight]:
        dense = linear("head.dense", *head_products(self.hidden)["dense"], bias=self.has_bias)
        bias = weight("head.bias", output_weights(self.rows, self.hidden)["output_bias"])
        return [*dense, *norm("head.norm", self.norm, self.hidden), bias, *super().weights]

    def products(self, tensor_degree: int = 1) -> list[Product]:
        return [Product(self.tokens, self.hidden, self.hidden), *super().products(tensor_degree)]

    def over_context(self, degree: int) -> "MaskedOutputPart":
        """Returns the head with the slots of all context parallel ranks: all masked tokens may be on any of them."""
        return replace(self, tokens=min(self.tokens * degree, self.sequence))

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        return {"masked_tokens": self.over_context(plan.mesh.context).tokens // plan.mesh.context}

    def backward_peak_bytes(self, plan: Plan) -> float:
        return OutputProjectionPart.backward_peak_bytes(self.over_context(plan.mesh.context), plan)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        masked = "batch*masked_tokens"
        scalars = _scalars(masked, stream, "max, sum, target logit of the masked tokens")
        states, back = "hidden states of masked tokens", "gradient of the masked tokens' hidden states"
        if stream.split and self.takes_first:
            # XLA: only the sentence order needs the first token's, so that it may be sent with the gradient.
            elements = "batch*(2*masked_tokens + 1)*hidden"
            why = f"{states} and of the first, from all sequence shards; {back}"
            packed = {"pooled": True, "also": LOSS_BACKWARD}
            return [scalars, over_model(LOSS_FORWARD, "all-reduce", stream.turns, elements, why, **packed)]
        lines = [scalars, over_model(LOSS_BACKWARD, "all-reduce", stream.turns, f"{masked}*hidden", back)]
        if stream.split:
            why = f"{states}, from all sequence shards"
            lines.append(over_model(LOSS_FORWARD, "all-reduce", stream.turns, f"{masked}*hidden", why, pooled=True))
        return lines


@dataclass(frozen=True)
class OneTokenPart(Part):
    """A replicated head on the hidden state of one token: an optional pooler, and a linear layer.

    BERT's sentence-order head, and the heads of finetuning.
    """

    hidden: int
    outputs: int
    name: str = "head"
    tokens: int = 1
    has_pooler: bool = True
    """If not, the linear layer has no bias either."""
    stands_alone: bool = True
    """False where another head gathers the hidden state in its collective."""
    width: str = "hidden"
    """Symbol of `hidden`."""

    @property
    def weights(self) -> list[Weight]:
        products = head_products(self.hidden, self.outputs)
        pooler = linear(f"{self.name}.pooler", *products["pooler"]) if self.has_pooler else []
        return [*pooler, *linear(f"{self.name}.classifier", *products["classifier"], bias=self.has_pooler)]

    def products(self, tensor_degree: int = 1) -> list[Product]:
        pooler = [Product(self.tokens, self.hidden, self.hidden)] if self.has_pooler else []
        return [*pooler, Product(self.tokens, self.hidden, self.outputs)]

    def over_context(self, degree: int) -> "OneTokenPart":
        """Returns the head as every context parallel rank computes it, though only one has the sample's token."""
        return replace(self, tokens=degree)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        # Unless the stream is split, every rank has all of it; a head that does not stand alone gets its hidden state
        # with another head's.
        if not stream.split or not self.stands_alone:
            return []
        why = "hidden state of the head's token, from all sequence shards"
        return [over_model(LOSS_FORWARD, "all-reduce", stream.turns, f"batch*{self.width}", why)]


@dataclass(frozen=True)
class SpansPart(Part):
    """A replicated linear layer on every token, which scores the first and the last token of an answer."""

    hidden: int
    tokens: int
    """Of a sample."""

    @property
    def weights(self) -> list[Weight]:
        return linear("head.spans", *head_products(self.hidden)["spans"])

    def products(self, tensor_degree: int = 1) -> list[Product]:
        return [Product(self.tokens, self.hidden, 2)]

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        if not stream.split:
            return []
        gathered = over_model(
            LOSS_FORWARD, "all-gather", stream.turns, "batch*2*sequence", "logits of all sequence shards"
        )
        return [gathered, local_gradient_sums(stream, "2*(hidden + 1)", "the linear layer on every token")]


def _scalars(tokens: str, stream: ResidualStream, why: str) -> Expectation:
    """Returns the float32 all-reduces of vocabulary-parallel cross-entropy, of a number per token."""
    # 3: maximum, sum of exponentials, target logit. Label smoothing: and the sum of logits. Distillation: and the
    # teacher's maximum and exponentials, the student's at the temperature, and the divergence.
    count = f"{7 if stream.distils else 4 if stream.label_smoothing else 3}*{stream.turns}"
    return over_model(LOSS_FORWARD, "all-reduce", count, tokens, why, dtype="float32")
