"""Megatron-LM's arguments of parallelism, checkpoints and logs: rows of the table."""

from mtjax.migrate.argument import Sections, always, equal, none, off, same

_PARALLEL = (
    equal(
        "--tensor-model-parallel-size --model-parallel-size --intra-layer-model-parallel-size",
        "--mesh model=N",
        "N-way tensor parallel",
        default=1,
    ),
    equal(
        "--pipeline-model-parallel-size --inter-layer-model-parallel-size",
        "--mesh stage=N",
        "N pipeline stages",
        default=1,
    ),
    equal("--context-parallel-size", "--mesh context=N", "N-way context parallel", default=1),
    equal(
        "--expert-model-parallel-size", "--mesh expert=N", "N-way expert parallel, a part of data parallel", default=1
    ),
    none("--expert-tensor-parallel-size", "experts have the tensor parallelism of the other layers (--mesh model=N)"),
    equal(
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-schedule interleaved --chunks V",
        "it counts layers: V = layers / pipeline stages / N",
    ),
    equal(
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-schedule interleaved --chunks N",
        "virtual stages per pipeline stage",
    ),
    equal("--decoder-first-pipeline-num-layers --num-layers-in-first-pipeline-stage", "--layers-per-stage A,B,..."),
    equal("--decoder-last-pipeline-num-layers --num-layers-in-last-pipeline-stage", "--layers-per-stage A,B,..."),
    equal(
        "--pipeline-model-parallel-layout",
        "--layers-per-stage A,B,...",
        "all chunks of a stage have the same number of layers in mtjax",
    ),
    equal("--account-for-embedding-in-pipeline-split", "--layers-per-stage A,B,...", default=False),
    equal("--account-for-loss-in-pipeline-split", "--layers-per-stage A,B,...", default=False),
    none(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "chunks alternate after as many microbatches as there are stages",
    ),
    equal(
        "--cp-comm-type",
        "--context-method",
        "p2p is ring, allgather is all-gather; a2a has no equivalent",
        default="p2p",
        same=("p2p", "allgather", ("p2p",), ("allgather",), None),
    ),
    none("--hierarchical-context-parallel-sizes", "one ring of all context-parallel ranks"),
    same(
        "--sequence-parallel", "sequence_parallel", note="Megatron ignores it without tensor parallelism", default=False
    ),
    equal("--use-distributed-optimizer", "--zero 1", default=False),
    equal(
        "--use-megatron-fsdp --use-custom-fsdp", "--zero 3", "as --data-parallel-sharding-strategy says", default=False
    ),
    equal(
        "--data-parallel-sharding-strategy",
        "--zero",
        "no_shard is 0, optim 1, optim_grads 2, optim_grads_params 3",
        default="no_shard",
    ),
    equal("--use-torch-fsdp2", "--zero 3", default=False),
    equal(
        "--num-distributed-optimizer-instances",
        "--mesh data=N,shard=S",
        "N sharding groups of S data-parallel ranks each",
        default=1,
    ),
    always("--overlap-grad-reduce", "on (--overlap)", default=False),
    always("--overlap-param-gather", "on (--overlap)", default=False),
    always("--overlap-param-gather-with-optimizer-step", "up to XLA", default=False),
    always("--overlap-p2p-communication-warmup-flush", "on (--overlap)", default=False),
    none(
        "--tp-comm-overlap",
        "tensor-parallel communication is not split into pieces that overlap with matmuls",
        default=False,
    ),
    none("--tp-comm-overlap-cfg", "no such overlap"),
    *(always(f"--ddp-{name}", "XLA combines collectives") for name in ("num-buckets", "bucket-size")),
    always("--ddp-average-in-collective", "gradients are averaged", default=False),
    always("--ddp-pad-buckets-for-high-nccl-busbw", "XLA combines collectives", default=False),
    always("--defer-embedding-wgrad-compute", "up to XLA", default=False),
    always("--use-nccl-ub", "up to XLA's flags", default=False),
    always(
        "--use-tp-pp-dp-mapping",
        "always this order; Megatron's default puts pipeline stages outermost",
        default=False,
    ),
    always("--high-priority-stream-groups", "up to XLA"),
    always("--nccl-communicator-config-path", "NCCL's environment variables hold for mtjax too"),
    always("--distributed-backend", "NCCL on GPUs, Gloo on CPUs", same=("nccl", None)),
    equal(
        "--distributed-timeout-minutes",
        "--step-timeout SECONDS",
        "of a step that hangs; a lost process is noticed within --peer-timeout, 30 s by default",
        default=10,
    ),
    always("--local-rank", "processes find their numbers by Slurm, MPI or Kubernetes"),
    always("--use-cpu-initialization", "weights do not depend on the mesh", default=False),
    none("--data-parallel-random-init", "all ranks start with the same weights", default=False),
    always("--disable-gloo-process-groups", "not needed", default=False),
    equal("--deterministic-mode", "--deterministic", default=False),
    equal("--check-weight-hash-across-dp-replicas-interval", "--check-replicas N", "recomputes a step two more times"),
)
_CHECKPOINTS = (
    same("--save", "out", note="the folder of the run: checkpoints, logs and config.toml"),
    equal("--load", "--resume", "after mtjax convert --with-optimizer, in the folder that it writes"),
    equal("--finetune", "--init-from DIR", "weights of --load, a new optimizer, step 0", default=False),
    equal("--no-load-optim", "--init-from DIR", "weights of --load, a new optimizer, step 0", default=False),
    always("--no-load-rng", "random numbers follow from seed and step", default=False),
    equal("--pretrained-checkpoint", "--init-from DIR", "after mtjax convert --from megatron:N"),
    same("--save-interval --persistent-save-interval", "checkpoint_every"),
    same("--save-retain-interval", "keep_every", note="mtjax also keeps the newest --keep-last checkpoints"),
    equal("--non-persistent-save-interval", "--local-every N", "with --local-checkpoints DIR"),
    none("--non-persistent-ckpt-type", "see --local-checkpoints"),
    none("--ckpt-step", "resume from the newest; --init-from takes one of a run's checkpoints"),
    none("--no-save-optim", "checkpoints have the optimizer's state", default=False),
    always("--no-save-rng", "random numbers follow from the seed and the step", default=False),
    equal(
        "--ckpt-format",
        "mtjax convert",
        "runs save mtjax's own format; see Checkpoints for which of Megatron's formats can be read",
        default="torch_dist",
    ),
    always("--async-save", "checkpoints are always written in the background", default=False),
    always("--use-persistent-ckpt-worker", "checkpoints are always written in the background", default=False),
    always("--ckpt-fully-parallel-save", "every rank writes its shards", default=False),
    always("--ckpt-fully-parallel-load", "every rank reads its shards", default=False),
    always("--ckpt-assume-constant-structure", "not needed", default=False),
    always("--dist-ckpt-strictness", "a checkpoint of another model is always refused"),
    always("--auto-detect-ckpt-format", "mtjax convert recognizes the format", default=False),
    always("--use-checkpoint-args", "mtjax convert takes the model from the checkpoint", default=False),
    none("--exit-on-missing-checkpoint", "--resume starts from step 0 where there is no checkpoint", default=False),
)
_ENDS = (
    always("--exit-signal-handler", "SIGTERM always saves and ends the run", default=False),
    none("--exit-duration-in-mins", "let the scheduler send SIGTERM before the time is up, as examples/slurm.sh does"),
    none("--exit-interval", "the run goes on to its last step: end it by the scheduler's time limit"),
    always("--adlr-autoresume", "see mtjax launch --restarts", default=False),
    always("--inprocess-restart", "see mtjax launch --restarts", default=False),
    always("--rerun-mode", "see --check-replicas"),
    off(
        always("--no-check-for-nan-in-loss-and-grad", "a step whose loss or gradient is not finite changes nothing"),
        "check_for_nan_in_loss_and_grad",
    ),
    none("--check-for-spiky-loss", "only losses that are not finite are noticed", default=False),
    always("--manual-gc", "Python's garbage collector rarely runs during steps", default=False),
    always("--manual-gc-interval", "Python's garbage collector rarely runs during steps"),
    always("--empty-unused-memory-level", "XLA plans memory before the run"),
    none("--skip-train", "use mtjax evaluate", default=False),
)
_LOGS = (
    same("--log-interval", "log_every", default=100),
    same("--eval-interval", "valid_every", default=1000),
    same("--eval-iters", "valid_batches", default=100),
    none("--full-validation", "a validation has --valid-batches batches", default=False),
    always("--tensorboard-dir", "TensorBoard events are always in the folder of --out"),
    *(
        always(f"--{name}", "TensorBoard events are always in the folder of --out")
        for name in (
            *("tensorboard-log-interval", "tensorboard-queue-size", "log-timers-to-tensorboard"),
            *("log-memory-to-tensorboard", "log-validation-ppl-to-tensorboard", "log-world-size-to-tensorboard"),
        )
    ),
    equal("--wandb-project", "mtjax train --track wandb", "with wandb's environment variable WANDB_PROJECT=N"),
    equal("--wandb-entity", "mtjax train --track wandb", "with wandb's environment variable WANDB_ENTITY=N"),
    always("--wandb-exp-name", "the name there is that of the run's folder (--out)"),
    always("--wandb-save-dir", "in the folder of --out"),
    always("--log-throughput", "the log always has tokens/s, TFLOP/s and MFU", default=False),
    always("--log-progress", "metrics.jsonl always has the progress", default=False),
    none("--log-params-norm", "it is not logged", default=False),
    none("--log-num-zeros-in-grad", "it is not logged", default=False),
    none("--timing-log-level", "no timers inside a step: see --profile"),
    none("--timing-log-option", "no timers inside a step: see --profile"),
    always("--logging-level", "not needed"),
    always("--no-one-logger", "not needed", default=False),
    equal("--profile", "mtjax train --profile FIRST:LAST", default=False),
    equal("--profile-step-start", "mtjax train --profile FIRST:LAST", default=10),
    equal("--profile-step-end", "mtjax train --profile FIRST:LAST", default=12),
    always("--profile-ranks", "the first process is traced"),
    always("--use-pytorch-profiler", "jax's profiler", default=False),
    none("--record-memory-history", "see mtjax inspect for memory by moment", default=False),
)
SYSTEM: Sections = {
    "Parallelism": _PARALLEL,
    "Checkpoints": _CHECKPOINTS,
    "How a run ends": _ENDS,
    "Validation and logs": _LOGS,
}
