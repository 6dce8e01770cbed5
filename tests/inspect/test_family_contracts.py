"""The contracts of BERT and T5 on compiled programs, in elements."""

from collections import Counter
from functools import cache

import pytest

from mtjax.config import Config
from mtjax.inspect.report import Report, inspect, landmarks
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, tiny
from tests.inspect.test_contract import sent
from tests.tiny import MODERNBERT

T5 = {"family": "t5", "decoder_sequence_length": 32, "num_decoder_layers": 2}
POST = {"family": "bert", "norm_placement": "post"}
GROUPS = {"num_layers": 4, "recompute_num_layers": 2}
BLOCK = GROUPS | {"recompute_method": "block", "num_decoder_layers": 1}
"""The decoder has fewer layers than are to be computed again."""


def report_of(**fields):
    return _report(tiny(**fields))


@cache
def _report(config: Config) -> Report:
    """2x4 on virtual CPUs."""
    return inspect(config, find_target("cpu"))


@pytest.mark.long
def test_a_post_ln_layer_computes_both_of_its_sums_again():
    pre, post = report_of(family="bert"), report_of(**POST)
    array = ("all-reduce", 2 * 64 * 64, "f32")
    assert pre.verdict.violations == post.verdict.violations == ()
    assert sent(pre, "layer recompute") == {array: 3 * 2}
    assert sent(post, "layer recompute") == {array: 2 * 3 * 2}
    assert sent(post, "layer forward") == sent(post, "layer backward") == {array: 2 * 3 * 2}


@pytest.mark.long
def test_berts_loss_sends_the_masked_tokens_alone():
    """10 of 64 tokens at most, in 2 microbatches of 2: their gradient, and with split sequences the tokens before."""
    array, first = ("all-reduce", 2 * 10 * 64, "f32"), ("all-reduce", 2 * 64, "f32")
    scalars = {("all-reduce", 2 * 10, "f32"): 2 + 2 * 2}  # the largest logits, and two sums in one operation
    whole, split = report_of(family="bert"), report_of(family="bert", sequence_parallel=True)
    assert whole.verdict.violations == split.verdict.violations == ()
    assert sent(whole, "loss forward") == scalars
    assert sent(whole, "loss backward") == {array: 2}
    together = Counter(sent(split, "loss forward")) + Counter(sent(split, "loss backward"))
    assert together == Counter(scalars | {array: 2 + 2, first: 2})  # the compiler packs the first token's with either


@pytest.mark.long
@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.exhaustive), "gpt"])
def test_a_finetuned_head_sends_one_token_of_each_sample_where_sequences_are_split(family):
    """In 2 microbatches of 2; without split sequences every rank has what it needs."""
    head = {"family": family, "head": "classification", "num_labels": 3}
    whole, split = report_of(**head), report_of(**head, sequence_parallel=True)
    assert whole.verdict.violations == split.verdict.violations == ()
    assert sent(whole, "loss forward") == sent(whole, "loss backward") == {}
    assert sent(split, "loss forward") == {("all-reduce", 2 * 64, "f32"): 2}


@pytest.mark.long
def test_spans_send_two_logits_for_each_token_where_sequences_are_split():
    """64 tokens, in 2 microbatches of 2; the gradients of 2 x 64 weights and 2 biases are summed once each."""
    head = {"family": "bert", "head": "spans"}
    whole, split = report_of(**head), report_of(**head, sequence_parallel=True)
    assert whole.verdict.violations == split.verdict.violations == ()
    assert sent(whole, "loss forward") == sent(whole, "loss backward") == {}
    assert sent(split, "loss forward") == {("all-gather", 2 * 2 * 64, "f32"): 2}


@pytest.mark.long
def test_a_t5_decoder_layer_has_three_sublayers():
    """An encoder of 3 layers and 64 tokens, a decoder of 2 layers and 32 tokens; 2 microbatches of 2."""
    report = report_of(**T5)
    assert report.verdict.violations == ()
    read, written = ("all-reduce", 2 * 64 * 64, "f32"), ("all-reduce", 2 * 32 * 64, "f32")
    assert sent(report, "layer forward") == {read: 2 * 3 * 2, written: 3 * 2 * 2}
    assert sent(report, "layer recompute") == {read: 3 * 2, written: 2 * 2 * 2}
    assert sent(report, "layer backward") == {read: 2 * 3 * 2 + 2 * 2, written: 3 * 2 * 2}


@pytest.mark.long
def test_logits_are_recognised_by_the_tokens_that_have_any():
    """Those that T5's decoder writes, and BERT's masked ones; of 256 rows, in microbatches of 2."""
    assert landmarks(report_of(**T5).step).logits == 2 * 32 * 256
    assert landmarks(report_of(family="bert").step).logits == 2 * 10 * 256


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"family": "bert", "sequence_parallel": True, "zero": 1}, marks=pytest.mark.exhaustive),
        pytest.param(POST | {"sequence_parallel": True}, marks=pytest.mark.exhaustive),
        POST | {"zero": 1, "recompute": "none"},
        pytest.param(T5 | {"zero": 1}, marks=pytest.mark.exhaustive),
        pytest.param(T5 | {"zero": 3, "sequence_parallel": True}, marks=pytest.mark.exhaustive),
        T5 | {"position": "learned", "norm": "layernorm", "bias": True, "sequence_parallel": True},
        pytest.param(T5 | {"recompute": "none", "microbatch_size": 4}, marks=pytest.mark.exhaustive),
        pytest.param(
            T5 | {"relative_bias_layers": "all", "zero": 3, "sequence_parallel": True}, marks=pytest.mark.exhaustive
        ),
        pytest.param(T5 | {"relative_bias_layers": "all", "recompute": "none"}, marks=pytest.mark.exhaustive),
        pytest.param(T5 | GROUPS, marks=pytest.mark.exhaustive),
        pytest.param(T5 | BLOCK, marks=pytest.mark.exhaustive),
        T5 | GROUPS | {"relative_bias_layers": "all", "sequence_parallel": True, "zero": 3},
        pytest.param(POST | GROUPS, marks=pytest.mark.exhaustive),
        POST | BLOCK,
        pytest.param(MODERNBERT | {"sequence_parallel": True, "zero": 3}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_other_layouts_keep_theirs(fields):
    assert report_of(**fields).verdict.violations == ()


PRE = {"family": "bert"}
H100 = {
    f"{name}{', split sequences' if split else ''}, ZeRO-{zero}": {**family, "zero": zero, "sequence_parallel": split}
    for name, family, layouts in (
        ("pre-LN", PRE, ((0, False), (3, True))),
        ("ModernBERT", MODERNBERT, ((0, False), (1, True))),
        ("post-LN", POST, ((0, True), (1, False), (2, True), (3, False))),
        ("T5", T5, ((0, False), (1, True), (2, True), (3, False))),
    )
    for zero, split in layouts
}
"""What is not a GPT's with each ZeRO, and with whole and with split sequences; pre-LN BERT's layers are a GPT's."""
COVERING = ("ModernBERT, split sequences, ZeRO-1",)
"""Post-norms are in a row of tests/inspect/test_settings.py, and presets with one sample a microbatch in
tests/inspect/test_presets.py; the other cases are compiled in `make test-layouts` alone."""


@cache
def h100_report(case: str) -> Report:
    """2x4 in one server of H100s."""
    return inspect(tiny(**H100[case]), find_target("h100x8"))


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    "case", [case if case in COVERING else pytest.param(case, marks=pytest.mark.exhaustive) for case in H100]
)
def test_contracts_hold_on_h100(case):
    assert h100_report(case).verdict.violations == ()


@needs_aot
@pytest.mark.long
def test_t5_on_h100_adds_the_gradients_of_what_cross_attention_reads_before_it_sends_them():
    """And sends the rows of both embeddings in one operation; all else as on CPUs, in 16 bits."""
    report = h100_report("T5, ZeRO-0")
    read, written = ("all-reduce", 2 * 64 * 64, "bf16"), ("all-reduce", 2 * 32 * 64, "bf16")
    assert sent(report, "embedding forward") == {read: 2, written: 2}
    assert sent(report, "layer forward") == {read: 2 * 3 * 2, written: 3 * 2 * 2}
    assert sent(report, "layer recompute") == {read: 3 * 2, written: 2 * 2 * 2}
    assert sent(report, "layer backward") == {read: 2 * 3 * 2 + 2, written: 3 * 2 * 2}
