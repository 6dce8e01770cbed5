#!/bin/bash
# Llama 3 8B in FP8 on one server of H100s, with the arguments of Megatron-LM's example for it.

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
#export NVTE_FWD_LAYERNORM_SM_MARGIN=16

CHECKPOINTS=${1:-"checkpoints/llama3_8b_fp8"}
LOGS=${2:-"logs/llama3_8b_fp8"}
TOKENIZER=${3:-"MOCK"} # a folder, or MOCK
DATA=${4:-"MOCK"}

mkdir -p "$(dirname "$CHECKPOINTS")"

GPUS_PER_NODE=8
NUM_NODES=1
MASTER_ADDR=${MASTER_ADDR:-localhost}
NODE_RANK=${NODE_RANK:-0}
PROGRAM="pretrain_gpt.py"

TP=1
CP=1
LAYERS=32
DTYPE="fp8"
LENGTH=8192
CACHE="${PWD}/cache_llama3_8b_fp8"

LAUNCHER=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR)

MODEL=(
    --use-mcore-models
    --num-layers $LAYERS
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $LENGTH
    --max-position-embeddings $LENGTH
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --init-method-std 0.0134
    --attention-backend fused
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4      # of embeddings and output layer
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
    --exit-duration-in-mins 235
)

PRECISION=()
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi

PARALLEL=(
    --tensor-model-parallel-size $TP
    --context-parallel-size $CP
    # --pipeline-model-parallel-size 1
    --sequence-parallel
)
SHARDING=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING+=("${SHARDING[@]}")

CORPUS=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    CORPUS+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256"
        "--data-cache-path ${CACHE}"
        "--tiktoken-pattern v2"
        "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader"
        "--no-mmap-bin-files"
        "--num-workers 1"
    )
else
    CORPUS+=(
        "--data-path $DATA"
        "--tokenizer-type HuggingFaceTokenizer"
        "--tokenizer-model $TOKENIZER"
        "--data-cache-path ${CACHE}"
        "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader"
        "--no-mmap-bin-files"
        "--num-workers 1"
        "--vocab-size 128256"
    )
fi

LOGGING=(
    --log-interval 1
    --eval-iters 32
    --eval-interval 100
    --save-interval 1000
    --log-throughput
    --profile
    --profile-step-start 4
    --profile-step-end 6
    --ckpt-format torch_dist
    --distributed-timeout-minutes 60
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --tensorboard-dir "$LOGS"
)

if [ ! -f "$PROGRAM" ]; then
    echo "$PROGRAM is missing"
    exit 1
fi

torchrun ${LAUNCHER[@]} \
    "$PROGRAM" \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    ${PRECISION[@]} \
    ${PARALLEL[@]} \
    ${CORPUS[@]} \
    ${LOGGING[@]}
