"""What `mtjax evaluate` reads from its command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.config.field_metadata import TOKENS, WIDTH, at_least
from mtjax.errors import UserError

DESCRIPTION = """Evaluates a GPT or Llama on text that it has not been trained for.

Tasks:
  wikitext103  perplexity of the words of WikiText-103's wiki.test.tokens, as the paper counts them
  lambada      accuracy of the last word of each passage of LAMBADA's JSON lines, strict and lenient
  perplexity   perplexity and bits per byte of a text file, of JSON lines with "text", or of a corpus (.bin and .idx)

--harness asks tasks of EleutherAI's lm-eval instead (extra evaluate).

Weights are a run (its newest checkpoint), one of its checkpoints, a converted folder, hf:DIR or megatron:DIR.

Examples:
  mtjax evaluate --task wikitext103 --data wiki.test.tokens --from runs/gpt2-1.2b-1 --overlap 32
  mtjax evaluate --task lambada --data lambada_test.jsonl --from hf:gpt2 --mesh 4x2 --out lambada.json
  mtjax evaluate --task perplexity --data book.txt --from runs/default-1
  mtjax evaluate --harness hellaswag,arc_easy --few-shot 5 --from hf:gpt2
  mtjax evaluate --harness my_task --harness-include my_tasks --from runs/default-1 --out results.json
"""


@dataclass(frozen=True)
class Options:
    """What to evaluate, on what, and where."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="WEIGHTS")]
    """The model: RUN, hf:DIR or megatron:DIR."""
    task: Literal["wikitext103", "lambada", "perplexity"] | None = None
    """What is asked of the model."""
    data: Path | None = None
    """The task's file."""
    harness: str | None = None
    """Tasks and groups of lm-eval by their names, or YAML files of tasks: one, or several with commas between them."""
    harness_include: Path | None = None
    """A folder with the YAML files of your own tasks, which then have names, too."""
    few_shot: int | None = at_least(0, None, most=WIDTH)
    """Solved examples before each question of the harness; as many as the task says when not given."""
    limit: int | None = at_least(1, None, most=TOKENS)
    """Ask only so many questions of each task of the harness, to try it out."""
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
    """host:port of process 0, for several processes that were not started by torchrun, Slurm, MPI or Kubernetes."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes; goes with --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Number of this process, from 0; goes with --coordinator."""
    compile_cache: str | None = None
    """Folder where compiled programs are kept, or off; $JAX_COMPILATION_CACHE_DIR when not given, else a folder in
    ~/.cache."""

    def check(self) -> None:
        """Checks that options are given that belong together.

        Raises:
          UserError: they don't.
        """
        if (self.task is None) == (self.harness is None):
            several = "is missing: name a --task, or tasks of lm-eval with --harness"
            raise UserError(
                "--task and --harness ask different things: give one of them" if self.task else f"--task {several}"
            )
        of_tasks, of_harness = ("data", "overlap"), ("harness_include", "few_shot", "limit")
        idle = [name for name in (of_tasks if self.harness else of_harness) if getattr(self, name) is not None]
        if idle:
            owner = "a --task" if self.harness else "--harness"
            raise UserError(f"--{idle[0].replace('_', '-')} is of {owner}, which is not given: leave it out")
        if self.task and self.data is None:
            raise UserError(f"--data is missing: name the file of {self.task}")
