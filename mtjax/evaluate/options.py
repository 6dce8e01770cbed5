"""What `mtjax evaluate` reads from its command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.config.setting import WIDTH, at_least

DESCRIPTION = """Evaluates a GPT or Llama on text that it has not been trained for.

Tasks:
  wikitext103  perplexity of the words of WikiText-103's wiki.test.tokens, as the paper counts them
  lambada      accuracy of the last word of each passage of LAMBADA's JSON lines, strict and lenient
  perplexity   perplexity and bits per byte of a text file, of JSON lines with "text", or of a corpus (.bin and .idx)

Weights are a run (its newest checkpoint), one of its checkpoints, a converted folder, hf:DIR or megatron:DIR.

Examples:
  mtjax evaluate --task wikitext103 --data wiki.test.tokens --from runs/gpt2-1.2b-1 --overlap 32
  mtjax evaluate --task lambada --data lambada_test.jsonl --from hf:gpt2 --mesh 4x2 --out lambada.json
  mtjax evaluate --task perplexity --data book.txt --from runs/default-1
"""


@dataclass(frozen=True)
class Options:
    """What to evaluate, on what, and where."""

    task: Literal["wikitext103", "lambada", "perplexity"]
    """What is asked of the model."""
    data: Path
    """The task's file."""
    source: Annotated[str, tyro.conf.arg(name="from", metavar="WEIGHTS")]
    """The model: RUN, hf:DIR or megatron:DIR."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL, say 4x2, as DATAxSTAGExMODEL, or by name: data=4,model=2."""
    overlap: int | None = at_least(1, None, most=WIDTH)
    """Tokens that each window of a text but the first counts: the paper counts 32 of 1,024; all when not given."""
    sequence_length: int | None = at_least(2, None, most=WIDTH)
    """Tokens that are read at once; as many as the model was trained with when not given."""
    rows: int = at_least(1, 8, most=WIDTH)
    """Windows or passages that each data rank reads at once."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of products."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel."""
    sequence_parallel: bool = False
    """Split the residual stream over `model`, for less memory."""
    tokenizer: str | None = None
    """KIND:PATH of the tokenizer; the one that came with the weights when not given."""
    out: Path | None = None
    """JSON file of the results. While it is not there, what is done is kept beside it, and the same command goes on."""
    config: str | None = None
    """A config that describes the model in a megatron folder, if the folder does not."""
    coordinator: str | None = None
    """host:port of process 0, for several processes that were not started by Slurm, MPI or Kubernetes."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes; goes with --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Number of this process, from 0; goes with --coordinator."""
    compile_cache: str | None = None
    """Folder where compiled programs are kept, or off; $JAX_COMPILATION_CACHE_DIR when not given, else a folder in
    ~/.cache."""
