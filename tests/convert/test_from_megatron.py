"""Launch scripts of Megatron-LM, read without running them, and the configs they become."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mtjax import cli, config
from mtjax.convert.from_megatron.expand import shown
from mtjax.convert.from_megatron.script import Script
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh

SCRIPTS = Path(__file__).parent / "megatron_scripts"
GPT3 = ["ckpt", "logs", "gpt2/vocab.json", "gpt2/merges.txt", "corpus_text_document"]

TANGLED = r"""
X=3 # a comment
A=(--a 1  # another
   "--b 2" --c "$X y")
A+=("--d" $X)
B=()
if [[ "$X" == "3" ]] || [[ -z "$Q" ]]; then
  B+=("--e '9,1'"); else B+=(--no); fi
if [ $X -gt 4 ]; then C=big; elif [[ $X == [23] && -n $X ]]; then C="in between"; else C=small; fi
[ -z "$FOO" ] && FOO=bar
[ -n "$FOO" ] || FOO=wrong
SUM=2+3
OPT=" --l $((X*2+1)) --of-a-sum $((SUM*2)) --of-its-text $(($SUM*2)) \
  --m ${Y:-"d e"} "
OPT="$OPT --z ${1} \$5"
OPT+=" --last ${#A[@]}"
say() { echo "$1"; B+=("--said" "$1"); }
say 'hi  there'
case $X in 1) Z=1;; [23]) Z=two ;; *) Z=no;; esac
for i in 4; do OPT+=" --i$i"; done
if ! [ -d . ]; then exit 1; fi
cat <<EOF > /dev/null
 junk ' junk --junk
EOF
export W="a 'b' c"
declare -a D=(p "q r")
readonly K=7
torchrun --n ${#A[@]} prog.py ${A[*]} "${A[@]}" ${B[@]} $OPT "${B[@]}" "$Z" $Z"$C" "${D[@]}" $K ${W} "$W" '$X' \
  "x${X}y"z ${A[1]} "" --w=$W ${V:-"}"} "${V:-"a}b"}" 2>&1 | cat
"""


def bash_words(script: str, arguments: list[str], folder: Path) -> list[str]:
    """What bash gives to torchrun, without a variable of this environment."""
    text = 'torchrun() { printf "%s\\0" "$@"; }\n' + script
    path = folder / "run.sh"
    path.write_text(text)
    environment = {"PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        ["bash", str(path), *arguments], cwd=folder, capture_output=True, text=True, check=True, env=environment
    )
    return ended.stdout.rpartition("hi  there\n")[2].split("\0")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", ["tangled", "gpt3_175b", "llama3_8b_fp8"])
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    text = TANGLED if name == "tangled" else (SCRIPTS / f"{name}.sh").read_text()
    arguments = GPT3 if name == "gpt3_175b" else ["one"]
    (tmp_path / "pretrain_gpt.py").touch()
    script = Script(text, name, arguments, {})
    found = next(line.words for line in script.lines if line.words[0] == "torchrun")
    wanted = [word.replace(str(tmp_path), ".") for word in bash_words(text, arguments, tmp_path)]
    assert [shown(word) for word in found[1:]] == wanted
    assert not script.notes


def test_what_is_not_known_is_named() -> None:
    text = """
if command -v nvidia-smi; then X=1; fi
while read line; do echo $line; done < hosts
for lr in 1 2; do echo $lr; done
case $KIND in a) X=2;; esac
source env.sh
torchrun a.py --p $DATA/x --q $(hostname) --r `date +%s` --s ${A%x} --t $2 --u $((N + 1))
"""
    script = Script(text, "s", ["one"], {})
    words = " ".join(map(shown, script.lines[-1].words))
    assert words == "torchrun a.py --p $DATA/x --q $(hostname) --r `date +%s` --s ${A%x} --t $2 --u $N"
    assert [note.partition(":")[0] for note in script.notes] == ["line 2", "line 3", "line 4", "line 5", "line 6"]


def test_variables_of_the_caller_win_over_those_of_the_script() -> None:
    script = Script("X=1\nX+=2\ntorchrun $X ${Y:-5}", "s", [], {"X": "8", "Y": "9"})
    assert script.lines[-1].words == ["torchrun", "8", "9"]


def translated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The TOML's tables, and what is told."""
    assert cli.main(["from-megatron", *words]) == 0
    captured = capsys.readouterr()
    run = config.from_dict(tomllib.loads(captured.out))
    config.validate(run)
    check_config(run, parse_mesh(run.parallel.mesh))
    return tomllib.loads(captured.out), captured.err


def part(told: str, heading: str) -> list[str]:
    """The arguments below a heading."""
    lines = told.partition(f"{heading}:\n")[2].splitlines()
    return [line.split()[0].rstrip(":") for line in lines[: next((i for i, x in enumerate(lines) if x[0] != " "), 99)]]


NONE, DEFAULT, UNREAD = (
    "not supported by mtjax, and the effect",
    "on by default in mtjax, or not needed",
    "could not be read",
)


def test_gpt3_175b(capsys: pytest.CaptureFixture[str]) -> None:
    tables, told = translated(capsys, str(SCRIPTS / "gpt3_175b.sh"), *GPT3)
    assert tables == {
        "model": {
            "family": "gpt",
            "num_layers": 96,
            "hidden_size": 12288,
            "num_heads": 96,
            "sequence_length": 2048,
            "init_std": 0.006,
        },
        "parallel": {"mesh": "data=8,stage=16,model=8"},
        "data": {"data": "corpus_text_document", "tokenizer": "gpt2:gpt2", "split": "949,50,1"},
        "optimizer": {
            "learning_rate": 6e-5,
            "min_learning_rate": 6e-6,
            "warmup_steps": 430,  # 0.001 x 430,000
            "decay_steps": 430_000,
            "decay_style": "cosine",
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "clip_grad_norm": 1.0,
        },
        "training": {
            "steps": 500_000,
            "global_batch_size": 1536,
            "rampup_batch_size": [16, 16, 5859375],
            "microbatch_size": 1,
            "compute_dtype": "float16",
        },
        "output": {
            "out": "ckpt",
            "resume": True,
            "log_every": 100,
            "valid_every": 1000,
            "valid_batches": 10,
            "checkpoint_every": 10_000,
            "keep_every": 10_000,
        },
    }
    assert part(told, DEFAULT) == ["--tensorboard-dir", "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert NONE not in told
    assert "--rampup-batch-size: learning rate schedules count steps in mtjax" in told
    assert "--vocab-multiple 1024" in told  # mtjax's own default: nothing to write


def test_llama3_8b_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    tables, told = translated(capsys, str(SCRIPTS / "llama3_8b_fp8.sh"), "ckpt", "logs", "llama3", "corpus")
    assert tables["model"] == {
        "family": "gpt",  # layer norms, as the script has them
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_size": 14336,
        "sequence_length": 8192,
        "vocab_size": 128256,
        "vocab_multiple": 128,
        "position": "rope",
        "rope_theta": 1e6,
        "activation": "swiglu",
        "norm_weight": "offset",
        "bias": False,
        "tie_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.0134,
    }
    assert tables["parallel"] == {"mesh": "8x1", "zero": 1, "grad_reduce_dtype": "bfloat16", "step_timeout": 3600.0}
    assert tables["data"] == {
        "data": "corpus",
        "tokenizer": "hf:llama3/tokenizer.json",
        "split": "99,1,0",
        "cache_dir": "./cache_llama3_8b_fp8",
    }
    optimizer = tables["optimizer"]
    assert (optimizer["warmup_steps"], optimizer["decay_steps"]) == (30_518, 15_228_271)  # samples / 128
    assert tables["training"] == {
        "global_batch_size": 128,
        "train_samples": 1953125000,
        "microbatch_size": 1,
        "compute_dtype": "bfloat16",
        "fp8": "delayed",
        "fp8_format": "hybrid",
        "fp8_amax_history": 1024,
    }
    assert part(told, NONE) == ["--decoupled-lr", "--decoupled-min-lr", "--exit-duration-in-mins"]
    needless = part(told, DEFAULT)
    expected = {"--overlap-grad-reduce", "--manual-gc", "--sequence-parallel", "--rotary-percent", "--fp8-param-gather"}
    assert expected <= set(needless)
    assert "--profile 4:6" in told


def test_without_its_arguments_a_script_says_which_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    tables, told = translated(capsys, str(SCRIPTS / "gpt3_175b.sh"), "--set", "DATA=/data/c")
    assert tables["data"]["data"] == "/data/c"
    assert "out" not in tables["output"]
    assert part(told, UNREAD) == ["--vocab-file", "--merge-file", "--save", "--load"]
    assert "--vocab-file $3  $3 is an argument of the script" in told
    mock, told = translated(capsys, str(SCRIPTS / "llama3_8b_fp8.sh"))
    assert mock["model"]["vocab_size"] == 128257  # NullTokenizer adds the end of document
    assert {"--mock-data", "--tokenizer-type", "--tiktoken-pattern"} <= set(part(told, NONE))


SMALL = ["--num-layers", "8", "--hidden-size", "96", "--num-attention-heads", "4", "--seq-length", "32"]
SMALL += ["--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "100"]


def small(capsys: pytest.CaptureFixture[str], *words: str, gpus: int = 8) -> tuple[dict[str, Any], str]:
    tables, told = translated(capsys, "--gpus", str(gpus), "--", *SMALL, *words)
    return {name: value for table in tables.values() for name, value in table.items()}, told


def test_defaults_of_megatron_are_written_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """As of megatron/training/arguments.py; what has the same default here is left out."""
    found, _ = small(capsys)
    assert found | {"vocab_multiple": 128} == {
        "family": "gpt",
        "num_layers": 8,
        "hidden_size": 96,
        "num_heads": 4,
        "sequence_length": 32,
        "vocab_multiple": 128,
        "mesh": "8x1",
        "learning_rate": 1e-3,
        "min_learning_rate": 0.0,
        "warmup_steps": 0,
        "decay_style": "linear",
        "steps": 100,
        "global_batch_size": 16,
        "microbatch_size": 2,
        "compute_dtype": "float32",
        "log_every": 100,
        "valid_batches": 100,
        "checkpoint_every": 0,
    }
    llama = ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"]
    found, _ = small(capsys, *llama, "--untie-embeddings-and-output-weights")
    assert (found["family"], found["hidden_dropout"], found["attention_dropout"]) == ("llama", 0.1, 0.1)
    assert found["mlp_size"] == 256  # 8/3 x 96, in multiples of 64, as Megatron computes it


SETTINGS = {
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2": {"mesh": "data=2,stage=2,model=2"},
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2": {
        "mesh": "data=4,stage=2,model=1",
        "pipeline_schedule": "interleaved",
        "chunks": 2,  # it counts layers: 8 / 2 stages / 2
    },
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4": {"chunks": 4},
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3": {"layers_per_stage": [3, 5]},
    "--pipeline-model-parallel-size 2 --num-layers-in-last-pipeline-stage 2": {"layers_per_stage": [6, 2]},
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2": {"layers_per_stage": None},
    "--num-layers 10 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split": {"layers_per_stage": [2, 3, 3, 2]},
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|(tt|)*2,tttL": {
        "layers_per_stage": [1, 2, 2, 3]
    },
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttt|(t|)*1,t*3L": {
        "layers_per_stage": [2, 6],
        "chunks": 2,
    },
    "--context-parallel-size 2 --cp-comm-type allgather": {
        "mesh": "data=4,context=2,model=1",
        "context_method": "all-gather",
    },
    "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall": {
        "mesh": "data=2,expert=4,model=1",
        "expert_dispatch": "all-to-all",
        "router_aux_loss": 0.0,
    },
    "--num-experts 4 --disable-bias-linear --moe-layer-freq ([0]*2+[1]*6) --moe-aux-loss-coeff 1e-2": {
        "first_dense_layers": 2,
        "router_aux_loss": 0.01,
    },
    "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 64": {"vocab_multiple": 256},
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads": {"zero": 2},
    "--use-torch-fsdp2": {"zero": 3},
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2": {
        "mesh": "data=2,shard=4,model=1",
        "zero": 1,
    },
    "--lr-warmup-fraction 0.1": {"warmup_steps": 10},
    "--lr-decay-iters 50 --lr-warmup-fraction 0.1": {"warmup_steps": 5, "decay_steps": 50},
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style cosine": {
        "decay_style": "WSD",
        "wsd_decay_steps": 20,
        "wsd_decay_style": "cosine",
    },
    "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1": {
        "weight_decay_style": "linear",
        "start_weight_decay": 0.01,
        "weight_decay": 0.1,
    },
    "--recompute-activations": {"recompute": "selective"},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3": {
        "recompute": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
    "--fp16 --loss-scale 1024": {"compute_dtype": "float16", "loss_scale": 1024.0},
    "--eval-iters 0": {"valid_every": 0},
    "--data-path 0.3 a 0.7 b": {"data": "0.3 a 0.7 b"},
    "--train-data-path a --valid-data-path b": {"train_data": "a", "valid_data": "b"},
    "--tokenizer-type Llama2Tokenizer --tokenizer-model t.model": {"tokenizer": "sentencepiece:t.model"},
    "--save a --save-interval 10 --save-retain-interval 50": {"checkpoint_every": 10, "keep_every": 50, "out": "a"},
    "--disable-bias-linear --add-qkv-bias": {"bias": False, "attention_bias": "qkv"},
    "--seed 42 --deterministic-mode": {"seed": 42, "deterministic": True},
    "--norm-epsilon 1e-6 --clip-grad 0.5 --adam-eps 1e-5": {
        "norm_epsilon": 1e-6,
        "clip_grad_norm": 0.5,
        "epsilon": 1e-5,
    },
    "--position-embedding-type rope --rotary-percent 0.5": {"rope_fraction": 0.5},
    "--reset-position-ids --eod-mask-loss": {"reset_position_ids": True, "eod_mask_loss": True},
    "--model-parallel-size 2 --batch-size 4 --warmup .1 --checkpoint-activations --checkpoint-num-layers 2": {
        "mesh": "4x2",
        "microbatch_size": 4,
        "global_batch_size": 16,
        "warmup_steps": 10,
        "recompute": "full",
        "recompute_num_layers": 2,
    },
    "--activations-checkpoint-method block --activations-checkpoint-num-layers 3": {
        "recompute": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
    "--optimizer-cpu-offload --optimizer-offload-fraction 1.0": {"offload": "optimizer"},
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer-cpu-offload": {
        "adam_mu_dtype": "bfloat16",
        "offload": None,
    },
    "--qk-clip --qk-clip-threshold 50": {"qk_clip": 50.0, "qk_clip_alpha": None, "attention": None},
    "--qk-clip --qk-clip-alpha 0.25": {"qk_clip": 100.0, "qk_clip_alpha": 0.25},
    "--qk-clip --qk-layernorm --qk-clip-threshold 50": {"qk_clip": None, "attention": None},
    "--qk-clip-alpha 0.25": {"qk_clip": None, "qk_clip_alpha": None},
    "--bf16 --fp8-hybrid": {"fp8": "delayed", "fp8_format": "hybrid"},
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2": {
        "fp8": "tensorwise",
        "fp8_bf16_first_layers": 1,
        "fp8_bf16_last_layers": 2,
    },
    "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2": {"fp8": "delayed", "recompute_num_layers": 2, "fp8_bf16_first_layers": None},
    "--bf16 --fp8-hybrid --num-experts 4 --moe-layer-freq ([0]*1+[1]*7) --first-last-layers-bf16 "
    "--optimizer-cpu-offload": {
        "fp8": "delayed",
        "first_dense_layers": 1,
        "fp8_bf16_first_layers": None,
        "offload": "optimizer",
    },
    "--attention-backend flash --reset-attention-mask": {"attention": "cudnn"},
    "--squared-relu --apply-layernorm-1p --softmax-type learnable": {
        "activation": "relu2",
        "norm_weight": "offset",
        "attention_sinks": True,
    },
    "--window-size 128,0 --window-attn-skip-freq 4": {"attention_window": 129, "window_layers": "SSSF"},
    "--window-size 4,0 --window-attn-skip-freq ([1]*2+[0]*6)": {"window_layers": "SSFFFFFF"},
    "--position-embedding-type rope --no-rope-freq 4 --qk-layernorm": {
        "rope_layers": "RRRN",
        "qk_norm_kind": "layernorm",
        "qk_norm_bias": True,
    },
    "--hybrid-override-pattern M-M*|M-M* --mamba-num-groups 2 --mamba-head-dim 24 --squared-relu --qk-layernorm": {
        "family": "hybrid",
        "layer_pattern": "(M-M*)x2",
        "num_layers": None,
        "ssm_groups": 2,
        "ssm_head_dim": 24,
        "position": None,
        "activation": None,  # relu2 is the family's default
    },
    "--hybrid-layer-pattern M-M|*- --mamba-num-groups 2 --mamba-head-dim 24 --pipeline-model-parallel-size 2 "
    "--micro-batch-size 1": {"layer_pattern": "M-M*-", "layers_per_stage": [3, 2]},
    "--mamba-num-groups 1 --hybrid-attention-ratio .25 --hybrid-mlp-ratio .5 --position-embedding-type rope": {
        "layer_pattern": "M-*-M*--",
        "position": "rope",
    },
    "--hybrid-layer-pattern G-*- --normalization RMSNorm --swiglu --linear-num-key-heads 2 --linear-num-value-heads 8 "
    "--linear-value-head-dim 12 --attention-output-gate": {
        "layer_pattern": "G-*-",
        "ssm_heads": 8,
        "ssm_groups": 2,
        "ssm_head_dim": 12,
        "attention_output_gate": True,
    },
    "--distributed-timeout-minutes 30": {"step_timeout": 1800.0},
    # Names that Python reads as numbers, of which another text would be written.
    "--save 2024_01_15 --data-path 007 --data-cache-path 1e5": {
        "out": "2024_01_15",
        "data": "007",
        "cache_dir": "1e5",
    },
}


@pytest.mark.parametrize("words", SETTINGS)
def test_settings(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = small(capsys, *words.split())
    assert {name: found.get(name) for name in SETTINGS[words]} == SETTINGS[words]


DELTA_NETS = (
    "--hybrid-layer-pattern G-G*G- --experimental-attention-variant gdn --linear-attention-freq 4 --swiglu "
    "--normalization RMSNorm --mamba-num-groups 2 --mamba-head-dim 24"
)
TOLD = {
    "--qk-l2-norm": (NONE, "--qk-l2-norm"),
    "--attention-output-gate": (NONE, "--attention-output-gate"),
    "--window-size 128,128": (NONE, "--window-size"),
    "--softmax-type off-by-one": (NONE, "--softmax-type"),
    "--multi-latent-attention --kv-lora-rank 16": (NONE, "--kv-lora-rank"),
    "--wandb-exp-name run-$JOB": (DEFAULT, "--wandb-exp-name"),
    "--load a --save a": ("run first", "if"),
    "--optimizer sgd": (NONE, "--optimizer"),
    "--rotary-percent 1.0": (DEFAULT, "--rotary-percent"),
    "--optimizer adam": (DEFAULT, "--optimizer"),
    "--add-qkv-bias": (DEFAULT, "--add-qkv-bias"),
    "--cp-comm-type a2a": (NONE, "--cp-comm-type"),
    "--use-flash-attn": ("translated, with a difference", "cuDNN's"),  # dropout of attention is 0.1
    "--num-layers 10 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 3": (
        "translated, with a difference",
        "--layers-per-stage",
    ),
    "--account-for-loss-in-pipeline-split": (DEFAULT, "--account-for-loss-in-pipeline-split"),
    "--bf16 stray": (UNREAD, "stray"),
    DELTA_NETS: (DEFAULT, "--linear-attention-freq"),
    f"{DELTA_NETS} --untie-embeddings-and-output-weights": (DEFAULT, "--experimental-attention-variant"),
    DELTA_NETS.replace("G", "M"): (NONE, "--experimental-attention-variant"),
}


@pytest.mark.parametrize("words", TOLD)
def test_what_does_not_carry_over_is_told(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    heading, name = TOLD[words]
    assert name in part(small(capsys, *words.split())[1], heading)


def test_settings_of_documents_that_berts_samples_ignore_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--reset-attention-mask", "--eod-mask-loss", "--vocab-file", "v.txt"]
    (tmp_path / "bert.sh").write_text(f"torchrun pretrain_bert.py {' '.join([*SMALL, *given])}")
    tables, told = translated(capsys, str(tmp_path / "bert.sh"))
    assert not {"reset_attention_mask", "eod_mask_loss"} & set(tables.get("data", {}))
    assert {*given[:2]} <= set(part(told, DEFAULT))
    assert "--vocab-file" in part(told, NONE)


def test_a_run_that_mtjax_refuses_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["from-megatron", "--gpus", "4", "--", *SMALL, "--global-batch-size", "10"]) == 0
    assert "mtjax train will reject this config: global_batch_size 10" in capsys.readouterr().err


WRONG = {
    "": "nothing to translate: give a launch script",
    "missing.sh": "missing.sh can't be read: No such file or directory",
    "-- --num-layers 3": "missing --hidden-size, --num-attention-heads, --seq-length",
    "-- --num-layers three --hidden-size 8 --num-attention-heads 2 --seq-length 4": "three: must be an integer",
    "--gpus 3 SCRIPT": "3 GPUs are not a multiple of 128 (tensor 8 x pipeline 16 x context 1)",
    "--set X SCRIPT": "--set X is not NAME=VALUE",
    "t5.sh": "starts pretrain_t5.py, but only pretrain_gpt.py, pretrain_bert.py, pretrain_mamba.py",
    "empty.sh": "contains no command with arguments of Megatron-LM",
    "quote.sh": 'quote.sh, line 2: the quote " is not closed',
    "deep.sh": "nested more than 20 deep",
    "body.sh": "body.sh, line 1: the function's body must be in braces",
    "function.sh": "function.sh, line 1: the function's body must be in braces",
    "case.sh": "case.sh, line 2: case without a word",
    "backquote.sh": "contains no command with arguments of Megatron-LM",
    "grown.sh": "the variable X is longer than",
    "SMALL --lr-warmup-iter 3 --unheard": "--lr-warmup-iter 3 - did you mean '--lr-warmup-iters'?; --unheard; correct",
    "unknown.yaml": "unknown.yaml: unknown arguments: model-parallel: 2 - did you mean '--model-parallel-size'?",
    "SMALL --hidden-dropout many": "--hidden-dropout many: must be a number",
    "SMALL --lr": "--lr: must be a number",
    "SMALL --rotary-seq-len-interpolation-factor x --position-embedding-type rope": "factor x: must be a number",
    "SMALL --end-weight-decay x": "--end-weight-decay x: must be a number",
    "SMALL --moe-aux-loss-coeff x": "--moe-aux-loss-coeff x: must be a number",
    "SMALL --data-path --bf16": "--data-path: must be followed by a value",
    "SMALL --save to a folder": "--save to a folder: must be one value",
    "hybrid.sh": "'M-/M' contains '/', in Megatron multi-token prediction",
    "parts.sh": "--hybrid-layer-pattern M-|M*- and --decoder-first-pipeline-num-layers both divide the layers",
    "SMALL --rampup-batch-size 16": "must be three integers: START INCREMENT SAMPLES",
    "SMALL --lr-warmup-fraction 3": "must be a number from 0 to 1",
    "SMALL --moe-layer-freq 1 --rotary-base x": "--rotary-base x: must be a number",
    "SMALL --num-distributed-optimizer-instances 0": "instances 0: must be an integer above 0",
    "SMALL --lr-decay-style bogus": "decay_style = 'bogus' is not one of",
    "SMALL --train-samples 5": "has both --train-iters and --train-samples",
    "SMALL --lr-warmup-iters 200 --lr-decay-iters 100": "decay_steps 100 must be above warmup_steps 200",
    "SMALL --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|ttL": (
        "has 8 layers, and pipeline_model_parallel_layout Ettt|ttL of 2 pipeline stages do not add up to these"
    ),
    "SMALL --num-layers 7 --num-layers-per-virtual-pipeline-stage 2": "7 is not a multiple",
}


@pytest.mark.parametrize(("words", "said"), WRONG.items())
def test_wrong_input_is_one_sentence(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t5.sh").write_text("torchrun pretrain_t5.py --num-layers 3 --hidden-size 4\n")
    Path("hybrid.sh").write_text("torchrun pretrain_hybrid.py --hybrid-layer-pattern M-/M --hidden-size 4\n")
    divided = "--hybrid-layer-pattern M-|M*- --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"
    Path("parts.sh").write_text(f"torchrun pretrain_hybrid.py {divided.replace('|', chr(92) + '|')} --hidden-size 4\n")
    Path("empty.sh").write_text("echo hello\n")
    Path("quote.sh").write_text('X=1\nY="open\n')
    Path("deep.sh").write_text("f() { f; }\nf\n")
    Path("body.sh").write_text("f() (echo)\ng() { echo; }\n")
    Path("function.sh").write_text("function")
    Path("case.sh").write_text("X=1\ncase")
    Path("backquote.sh").write_text("X=$((1 + `))")
    Path("unknown.yaml").write_text("ENV: {A: 1}\nmodel: {num_layers: 3, model-parallel: 2}\n")
    Path("grown.sh").write_text("X=" + "x" * 1000 + "\n" + 'X="$X$X$X$X"\n' * 12)
    words = words.replace("SCRIPT", str(SCRIPTS / "gpt3_175b.sh")).replace("SMALL", f"-- {' '.join(SMALL)}")
    assert cli.main(["from-megatron", *words.split()]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_the_file_is_new_and_can_be_trained_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    words = ["from-megatron", str(SCRIPTS / "gpt3_175b.sh"), *GPT3, "--output", str(path)]
    assert cli.main(words) == 0
    assert f"next    mtjax train --config {path}" in capsys.readouterr().out
    assert config.load(path).training.rampup_batch_size == (16, 16, 5859375)
    assert cli.main(words) == 2
    assert "exists already" in capsys.readouterr().err


def test_other_files_of_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML, as Megatron's tests have it, and lines of arguments; both say what the arguments themselves say."""
    wanted, _ = translated(capsys, "--gpus", "8", "--", *SMALL, "--disable-bias-linear", "--bf16")
    pairs = list(zip(SMALL[::2], SMALL[1::2], strict=True))
    lines = tmp_path / "arguments.txt"
    lines.write_text(
        "".join(f"{name} {value}\n" for name, value in pairs) + "--disable-bias-linear\n--bf16 # a comment\n"
    )
    yaml = tmp_path / "model.yaml"
    pairs += [("--disable-bias-linear", "true"), ("--bf16", "true")]
    rows = "".join(f"  {name}: {value}\n" for name, value in pairs)
    yaml.write_text(f"ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n{rows}")
    for path in (lines, yaml):
        tables, told = translated(capsys, "--gpus", "8", str(path))
        assert tables == wanted
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1  it orders Megatron-LM's kernels" in told


def test_environment_variables_of_the_script_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of NCCL and CUDA hold; the report ends with the next command."""
    script = tmp_path / "run.sh"
    script.write_text(
        "export NCCL_IB_SL=1 CUDA_DEVICE_MAX_CONNECTIONS=1\nexport NVTE_FLASH_ATTN=1 LAYERS=3\n"
        f"NCCL_DEBUG=$UNSET torchrun --nproc_per_node=4 pretrain_gpt.py {' '.join(SMALL)}"
    )
    _, told = translated(capsys, str(script))
    held = "environment variables of the script that hold for mtjax, too: set them as there:\n"
    assert f"{held}  NCCL_IB_SL=1\n  NCCL_DEBUG=$UNSET\n" in told
    assert re.search(r"CUDA_DEVICE_MAX_CONNECTIONS=1 +it orders Megatron-LM's kernels and collectives", told)
    assert re.search(r"NVTE_FLASH_ATTN=1 +of PyTorch or Transformer Engine", told) and "LAYERS" not in told
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    assert cli.main(["from-megatron", str(script), "--output", str(tmp_path / "run.toml")]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"next    mtjax train --config {tmp_path / 'run.toml'}"


LAUNCHERS = {
    "torchrun --nproc_per_node=4 --nnodes 2 PROGRAM": 8,
    "torchrun --nproc-per-node 4 PROGRAM": 4,
    "python -m torch.distributed.launch --nproc_per_node 8 PROGRAM": 8,
    "srun --nodes=2 --ntasks-per-node=4 python PROGRAM": 8,
    "mpirun -np 16 python PROGRAM": 16,
    "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun bash -c 'python PROGRAM'": 32,
    "#SBATCH -N 4\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 PROGRAM": 32,
    "GPUS_PER_NODE=8\nNNODES=2\nWORLD_SIZE=$((GPUS_PER_NODE * NNODES))\n./launch PROGRAM": 16,
}


@pytest.mark.parametrize("text", LAUNCHERS)
def test_the_launcher_gives_the_number_of_gpus(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text.replace("PROGRAM", f"pretrain_gpt.py {' '.join(SMALL)}"))
    tables, _ = translated(capsys, str(path))
    assert tables["parallel"]["mesh"] == f"{LAUNCHERS[text]}x1"


def test_without_a_launcher_one_replica_is_taken_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    tables, told = translated(capsys, "--", *SMALL, "--tensor-model-parallel-size", "2")
    assert tables["parallel"]["mesh"] == "1x2"
    assert "the number of GPUs is unknown" in told


def test_a_checkpoint_there_is_converted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its optimizer; where there is none yet, the run's own config starts it, with what a tracker needs."""
    monkeypatch.chdir(tmp_path)
    words = [
        "from-megatron",
        "--gpus",
        "16",
        "--output",
        "a.toml",
        "--",
        *SMALL,
        "--load",
        "ckpt",
        "--wandb-project",
        "p",
    ]
    assert cli.main(words) == 0
    out, told = capsys.readouterr()
    assert out.startswith("next    WANDB_PROJECT=p mtjax train --config a.toml --track wandb  (with srun or mpirun")
    convert = "mtjax convert --from ckpt --to mtjax:runs/continued --with-optimizer"
    assert f"if ckpt has a checkpoint of Megatron-LM, go on from it: {convert}\n" in told
    Path("ckpt").mkdir()
    Path("ckpt/latest_checkpointed_iteration.txt").write_text("10")
    Path("a.toml").unlink()
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"next    {convert}\n"
    Path("a.toml").unlink()
    assert cli.main([*words, "--finetune"]) == 0
    out, told = capsys.readouterr()
    assert out == "next    mtjax convert --from ckpt --to mtjax:weights\n" and "--init-from weights" in told
