"""Megatron-LM's arguments of training and data: rows of the table. Names and defaults: its training/arguments.py."""

from mtjax.migrate.argument import Sections, always, equal, none, off, same

_BATCH = (
    same("--micro-batch-size --batch-size", "microbatch_size"),
    same("--global-batch-size", "global_batch_size", note="micro batch size x data-parallel size when not given there"),
    equal("--rampup-batch-size", "--rampup-batch-size START INCREMENT SAMPLES"),
    none("--step-batch-size-schedule", "batches have --global-batch-size from the start"),
    same("--train-iters", "steps"),
    same("--train-samples", "train_samples"),
    none("--decrease-batch-size-if-needed", "fewer GPUs keep the global batch size", default=False),
    none("--iterations-to-skip", "no steps are skipped by number"),
    same("--seed", "seed", default=1234),
)
_SCHEDULE = (
    same("--lr", "learning_rate"),
    same("--min-lr", "min_learning_rate", default=0.0),
    same("--lr-decay-style", "decay_style", default="linear", note="the same names"),
    same("--lr-decay-iters", "decay_steps", note="the run's steps when not given, in both"),
    equal("--lr-decay-samples", "--decay-steps STEPS", "STEPS = samples / global batch size"),
    same(
        "--lr-warmup-iters",
        "warmup_steps",
        default=0,
        note="step 0 has --initial-learning-rate, 0 by default, in both",
    ),
    equal("--lr-warmup-samples", "--warmup-steps STEPS", "STEPS = samples / global batch size", default=0),
    equal(
        "--lr-warmup-fraction --warmup",
        "--warmup-steps STEPS",
        "STEPS = fraction x decay steps; --warmup-fraction in mtjax finetune",
    ),
    same("--lr-warmup-init", "initial_learning_rate", default=0.0),
    same("--lr-wsd-decay-iters", "wsd_decay_steps"),
    equal("--lr-wsd-decay-samples", "--wsd-decay-steps STEPS", "STEPS = samples / global batch size"),
    same("--lr-wsd-decay-style", "wsd_decay_style", default="exponential"),
    none("--decoupled-lr", "embeddings and output layer have the learning rate of all other weights"),
    none("--decoupled-min-lr", "embeddings and output layer have the learning rate of all other weights"),
    always(
        "--override-opt_param-scheduler --override-opt-param-scheduler --override-lr-scheduler",
        "a resumed run follows its config",
        default=False,
    ),
    none(
        "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler --use-checkpoint-lr-scheduler",
        "a resumed run follows the config it is resumed with: give the config.toml of the run",
        default=False,
    ),
)
_OPTIMIZER = (
    same("--weight-decay", "weight_decay", default=0.01, note="of matrices only, in both"),
    same("--start-weight-decay --start-wd", "start_weight_decay"),
    equal("--end-weight-decay --end-wd", "--weight-decay N"),
    same("--weight-decay-incr-style --wd-incr-style", "weight_decay_style", default="constant"),
    same("--clip-grad", "clip_grad_norm", default=1.0),
    same("--adam-beta1", "beta1", default=0.9),
    same("--adam-beta2", "beta2", default=0.999),
    same("--adam-eps", "epsilon", default=1e-8),
    none(
        "--optimizer",
        "AdamW, unless you set --optimizer: muon, sgd and lion differ in scales",
        default="adam",
        same=("adam", None),
    ),
    none("--sgd-momentum", "AdamW has none; set --optimizer sgd for it", default=0.9),
    none("--muon-momentum", "AdamW has none; set --optimizer muon for it"),
    equal("--qk-clip", "--qk-clip N", "N is that of --qk-clip-threshold", default=False),
    equal("--qk-clip-threshold", "--qk-clip N", "with --qk-clip", default=100.0),
    equal("--qk-clip-alpha", "--qk-clip-alpha N", "with --qk-clip", default=0.5),
    equal(
        "--optimizer-cpu-offload",
        "--offload optimizer",
        "Adam's moments are in host memory; the update runs on the devices",
        default=False,
    ),
    always("--use-precision-aware-optimizer", "the types below say so", default=False),
    equal("--exp-avg-dtype", "--adam-mu-dtype bfloat16", "for bf16; fp16 and fp8 have no equivalent", default="fp32"),
    equal(
        "--exp-avg-sq-dtype",
        "--adam-nu-dtype bfloat16",
        "for bf16, rounded stochastically; fp16 and fp8 have no equivalent",
        default="fp32",
    ),
    none("--apply-wd-to-qk-layernorm", "norms of queries and keys have no weight decay", default=False),
    none("--no-weight-decay-cond-type", "vectors have no weight decay, also those of norms of queries and keys"),
    always(
        "--calculate-per-token-loss",
        "the loss is always the mean over all tokens of the global batch that count; Megatron's default is a mean of"
        " means of microbatches",
        default=False,
    ),
)
_PRECISION = (
    equal("--bf16", "--compute-dtype bfloat16", default=False),
    equal("--fp16", "--compute-dtype float16", default=False),
    equal(
        "--fp8-format --fp8",
        "--fp8 delayed --fp8-format N",
        note="--fp8 is the value of --fp8-recipe; experts' grouped matmuls stay in --compute-dtype",
    ),
    equal(
        "--fp8-recipe",
        "--fp8 N",
        note="Megatron's delayed and tensorwise; others are dropped. Scales are powers of two: add "
        "--fp8-scales exact for those of Transformer Engine",
        default="delayed",
    ),
    equal("--fp8-amax-history-len", "--fp8-amax-history N", note="16 when not given", default=1),
    equal(
        "--fp8-amax-compute-algo",
        "--fp8-amax-history 1",
        note="if it is most_recent, Megatron's default; max is mtjax's",
        default="most_recent",
    ),
    none("--fp8-margin", "scales let the largest value just fit"),
    none("--fp8-interval", "scales are updated in every step"),
    always(
        "--fp8-param-gather",
        "on with --fp8 delayed and no layers in bf16; else gathered in --compute-dtype",
        default=False,
    ),
    *(none(f"--fp4-{name}", "matmuls run in --compute-dtype: no FP4") for name in ("format", "recipe", "param-gather")),
    equal(
        "--first-last-layers-bf16",
        "--fp8-bf16-first-layers 1 --fp8-bf16-last-layers 1",
        "as many as --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 say; not with pipeline "
        "parallelism, recompute in groups, or dense layers beside layers with experts",
        default=False,
    ),
    equal("--num-layers-at-start-in-bf16", "--fp8-bf16-first-layers N", "with --first-last-layers-bf16", default=1),
    equal("--num-layers-at-end-in-bf16", "--fp8-bf16-last-layers N", "with --first-last-layers-bf16", default=1),
    same("--loss-scale", "loss_scale", note="dynamic when not given, in both"),
    same("--initial-loss-scale", "initial_loss_scale", default=2.0**32),
    same("--min-loss-scale --min-scale", "min_loss_scale", default=1.0),
    same("--loss-scale-window", "loss_scale_window", default=1000),
    same("--hysteresis", "hysteresis", default=2),
    always("--accumulate-allreduce-grads-in-fp32", "gradients are always added up in float32", default=False),
    equal(
        "--grad-reduce-in-bf16",
        "--grad-reduce-dtype bfloat16",
        "microbatches are still added up in float32",
        default=False,
    ),
    always("--attention-softmax-in-fp32", "softmax of attention is always float32", default=False),
    none("--fp16-lm-cross-entropy", "the loss is computed in float32", default=False),
    always("--disable-bf16-reduced-precision-matmul", "up to XLA", default=False),
)
_MEMORY = (
    equal("--recompute-activations", "--recompute selective", default=False),
    same("--recompute-granularity", "recompute", note="none when not given, in both"),
    same("--recompute-method", "recompute_method"),
    same("--recompute-num-layers", "recompute_num_layers", note="block counts layers of a pipeline stage in Megatron"),
    none(
        "--recompute-modules",
        "--recompute selective recomputes the core of attention (core_attn), no other modules",
        same=(("core_attn",), "core_attn", None),
    ),
    none(
        "--distribute-saved-activations --distribute-checkpointed-activations",
        "use --sequence-parallel, which shards saved activations",
        default=False,
    ),
    none("--cpu-offloading-num-layers", "see --recompute-offload", default=0, same=(0, None)),
    equal(
        "--attention-backend",
        "--attention auto",
        "flash and fused are auto; with --reset-attention-mask cudnn (Hopper and Blackwell); unfused and local are xla",
        default="auto",
    ),
    equal(
        "--use-flash-attn",
        "--attention auto",
        "auto takes flash attention for most models; --attention pallas or cudnn asks for it",
        default=False,
    ),
)
_FUSIONS = (
    always("--cross-entropy-loss-fusion", "logits and loss are computed in chunks (--loss-chunk)", default=False),
    always("--cross-entropy-fusion-impl", "logits and loss are computed in chunks (--loss-chunk)"),
    *(
        always(f"--no-{name}-fusion", "XLA decides what to fuse")
        for name in ("masked-softmax", "bias-swiglu", "bias-dropout", "rope", "gradient-accumulation")
    ),
    always("--no-persist-layer-norm", "XLA decides what to fuse", default=False),
    always("--transformer-impl", "one implementation", same=("local", "transformer_engine", None)),
    always("--use-mcore-models", "one implementation", default=False),
    none("--use-legacy-models", "the network is that of Megatron-Core", default=False),
    none("--enable-cuda-graph", "XLA decides about CUDA graphs", default=False),
    none("--cuda-graph-impl", "XLA decides about CUDA graphs", same=("none", None)),
)
_DATA = (
    equal("--data-path", "--data 'PREFIX' or --data '0.3 A 0.7 B'", "the same .bin and .idx files, the same order"),
    equal("--train-data-path", "--train-data '...'"),
    equal("--valid-data-path", "--valid-data '...'"),
    equal("--test-data-path", "--test-data '...'"),
    none("--data-args-path", "put its content into --data"),
    none("--per-split-data-args-path", "put its contents into --train-data, --valid-data and --test-data"),
    none("--fim-data", "samples are not rearranged to fill in the middle", default=False),
    none("--sft", "samples are those of pretraining: see mtjax finetune", default=False),
    none("--mock-data", "mtjax trains on text: give --data", default=False),
    # With blanks, as checkpoints have it: another text would be taken for a value that was given.
    same("--split", "split", default="969, 30, 1"),
    same("--data-cache-path", "cache_dir"),
    equal(
        "--tokenizer-type",
        "--tokenizer KIND:PATH",
        "GPT2BPETokenizer is gpt2:FOLDER, HuggingFaceTokenizer hf:tokenizer.json, Llama2Tokenizer and"
        " SentencePieceTokenizer sentencepiece:FILE, BertWordPiece* bert:vocab.txt",
    ),
    equal("--tokenizer-model", "--tokenizer KIND:PATH", "a file on disk, not a name on the Hugging Face hub"),
    equal(
        "--vocab-file", "--tokenizer gpt2:FOLDER", "the folder that has vocab.json and merges.txt; bert:FILE of BERT"
    ),
    equal("--merge-file", "--tokenizer gpt2:FOLDER", "the folder that has vocab.json and merges.txt"),
    none("--vocab-extra-ids", "only of T5", default=0),
    none("--tiktoken-pattern", "no tiktoken: convert it to a tokenizer.json"),
    same("--reset-position-ids", "reset_position_ids", default=False),
    same(
        "--reset-attention-mask",
        "reset_attention_mask",
        note="flash attention for 2,048 to 8,192 tokens on Hopper, or with --attention cudnn",
        default=False,
    ),
    none("--dataloader-inter-document-masking", "see --reset-attention-mask, which does so", default=False),
    same(
        "--eod-mask-loss",
        "eod_mask_loss",
        note="the loss is the mean over the tokens that are left, as with --calculate-per-token-loss",
        default=False,
    ),
    always("--num-workers", "samples are prepared in threads; --num-workers N prepares them in processes", default=2),
    off(always("--no-create-attention-mask-in-dataloader", "masks are made on the devices"), "create_attention_mask"),
    off(always("--no-mmap-bin-files", "files are mapped into memory, or read from a store"), "mmap_bin_files"),
    always("--dataloader-type", "one order of samples, Megatron's single", same=("single", None)),
    always("--num-dataset-builder-threads", "not needed"),
    none("--short-seq-prob", "BERT's short samples have Megatron's default share", same=(0.1, None)),
    none("--mask-prob", "15% of a BERT's tokens are masked", default=0.15, same=(0.15, None)),
)
TRAINING: Sections = {
    "Batches and steps": _BATCH,
    "Learning rate": _SCHEDULE,
    "Optimizer and loss": _OPTIMIZER,
    "Precision": _PRECISION,
    "Memory and attention kernels": _MEMORY,
    "Implementations": _FUSIONS,
    "Data and tokenizer": _DATA,
}
