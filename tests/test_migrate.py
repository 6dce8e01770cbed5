"""The table of Megatron-LM's arguments: what it names exists, and docs/migrate.md is what the command says."""

import re
from pathlib import Path

import pytest

from mtjax import cli
from mtjax.config.run import section_by_setting
from mtjax.migrate.megatron import TABLE, by_dest, by_name, markdown
from mtjax.migrate.other_tools import OTHERS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "migrate.md").read_text()
OPTIONS = {f"--{name.replace('_', '-')}" for name in section_by_setting()}
OPTIONS |= {f"--no-{name[2:]}" for name in OPTIONS} | {"--track", "--profile", "--from", "--to"}
OWN = {"--max-tokens", "--samples", "--beams", "--batch", "--context", "--weights-dtype", "--dtype", "--temperature"}
OWN |= {"--output", "--gpus"}
"""Of generate, serve and plan."""

MOST_USED = """
tensor-model-parallel-size pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage
num-virtual-stages-per-pipeline-rank context-parallel-size cp-comm-type expert-model-parallel-size
expert-tensor-parallel-size sequence-parallel use-distributed-optimizer use-megatron-fsdp
data-parallel-sharding-strategy overlap-grad-reduce overlap-param-gather tp-comm-overlap grad-reduce-in-bf16
accumulate-allreduce-grads-in-fp32 num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention
num-query-groups kv-channels seq-length max-position-embeddings position-embedding-type rotary-base rotary-percent
use-rope-scaling rope-scaling-factor normalization swiglu disable-bias-linear add-qkv-bias
untie-embeddings-and-output-weights qk-layernorm make-vocab-size-divisible-by attention-dropout hidden-dropout
init-method-std attention-backend use-flash-attn micro-batch-size global-batch-size rampup-batch-size train-iters
train-samples lr min-lr lr-decay-style lr-decay-iters lr-warmup-iters lr-wsd-decay-iters lr-wsd-decay-style
lr-warmup-fraction lr-warmup-samples lr-decay-samples weight-decay start-weight-decay end-weight-decay clip-grad
adam-beta1 adam-beta2 adam-eps optimizer bf16 fp16 fp8-format fp4-format loss-scale recompute-granularity
recompute-method recompute-num-layers recompute-modules data-path train-data-path split tokenizer-type tokenizer-model
vocab-file merge-file data-cache-path reset-position-ids reset-attention-mask eod-mask-loss save load finetune
no-load-optim pretrained-checkpoint save-interval ckpt-format async-save exit-duration-in-mins exit-signal-handler
log-interval eval-interval eval-iters tensorboard-dir wandb-project log-throughput profile profile-step-start
profile-step-end seed deterministic-mode num-experts moe-router-topk moe-aux-loss-coeff moe-z-loss-coeff
moe-token-dispatcher-type moe-expert-capacity-factor moe-layer-freq moe-router-pre-softmax moe-grouped-gemm
moe-ffn-hidden-size moe-shared-expert-intermediate-size distributed-timeout-minutes
"""


def test_the_most_used_arguments_are_in_it() -> None:
    assert not [name for name in MOST_USED.split() if f"--{name}" not in by_name()]


def test_every_argument_is_there_once() -> None:
    assert len(by_name()) == sum(len(row.names) for row in TABLE)
    assert len(by_dest()) == len(TABLE)


def test_what_it_names_exists() -> None:
    sections = section_by_setting()
    assert {row.setting for row in TABLE} - {None} <= set(sections)
    named = {option for row in TABLE for option in re.findall(r"--[a-z][\w-]+", row.equal)}
    assert named <= OPTIONS
    others = {option for texts in OTHERS.values() for text in texts for option in re.findall(r"--[a-z][\w-]+", text)}
    assert others <= OPTIONS | OWN


def test_every_row_says_something() -> None:
    assert not [row.names for row in TABLE if row.status == "equal" and not row.equal]
    assert not [row.names for row in TABLE if row.status != "equal" and not row.note]


def test_the_page_has_the_table() -> None:
    """Printed by `python -c "from mtjax.migrate.megatron import markdown; print(markdown())"`."""
    assert markdown() in PAGE


SHOWN = re.compile(
    r"    (mtjax from-megatron tests[^\n]*)\n\nprints\n\n```toml\n(.*?)```\n\nand on stderr\n\n```\n(.*?)```\n",
    re.DOTALL,
)
COMMANDS = SHOWN.findall(PAGE)


@pytest.mark.parametrize(("command", "config", "told"), COMMANDS)
def test_the_page_shows_what_the_command_says(
    command: str, config: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(command.split()[1:]) == 0
    assert capsys.readouterr() == (config, told)


def test_the_page_shows_two_scripts() -> None:
    assert len(COMMANDS) == 2
