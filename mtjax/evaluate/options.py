"""The options of `mtjax evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.config.field_metadata import TOKENS, WIDTH, Bound, at_least, setting
from mtjax.errors import UserError

DESCRIPTION = """Zero-shot evaluation of a GPT or Llama.

Tasks:
  wikitext103  perplexity of the words of WikiText-103's wiki.test.tokens, as the paper counts them
  lambada      accuracy of the last word of each passage of LAMBADA's JSON lines, strict and lenient
  perplexity   perplexity and bits per byte of a text file, of JSON lines with "text", or of a corpus (.bin and .idx)
  continuations  scores of texts that continue the prompts of JSON lines with "prompt": expected maximum, share above

--harness runs tasks of EleutherAI's lm-eval instead (requires the extra evaluate).

Weights are a run (its newest checkpoint), one of its checkpoints, a converted folder, hf:DIR,
megatron:DIR, or peft:DIR (adapters).

Examples:
  mtjax evaluate --task wikitext103 --data wiki.test.tokens --from runs/gpt2-1.2b-1 --overlap 32
  mtjax evaluate --task lambada --data lambada_test.jsonl --from hf:gpt2 --mesh 4x2 --out lambada.json
  mtjax evaluate --task perplexity --data book.txt --from runs/default-1
  mtjax evaluate --task perplexity --neighbours near/books --from runs/retro-1
  mtjax evaluate --harness hellaswag,arc_easy --few-shot 5 --from hf:gpt2
  mtjax evaluate --harness my_task --harness-include my_tasks --from runs/default-1 --out results.json
"""


NONE, SHUFFLED = "none", "shuffled"
"""Values of --neighbours."""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax evaluate`."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="WEIGHTS")]
    """The model: RUN, hf:DIR, megatron:DIR or peft:DIR."""
    task: Literal["wikitext103", "lambada", "perplexity", "continuations"] | None = None
    """The task."""
    data: Path | None = None
    """The task's file."""
    neighbours: str | None = None
    """perplexity of a run of Retro on its validation samples, in the place of --data: PREFIX of neighbours of theirs,
    which are compared with none; or none, or shuffled, the run's own given to other chunks."""
    scorer: str | None = None
    """continuations: a classifier's run or folder, hf:DIR, or command:PROGRAM, as in mtjax data select."""
    score_label: str | None = None
    """continuations: the class whose probability is the score. Default: the second of two classes."""
    samples: int = at_least(1, 25, most=2**16)
    """continuations: number of texts for each prompt."""
    max_tokens: int = at_least(1, 20, most=2**20)
    """continuations: most tokens of a text."""
    temperature: float = setting(1.0, bound=Bound(lambda value: 0 <= value <= 100, "from 0 to 100"))
    """continuations: sampling temperature; 0 always takes the most likely token."""
    top_p: float = setting(0.9, bound=Bound(lambda value: 0 < value <= 1, "above 0 and at most 1"))
    """continuations: sample from the most likely tokens whose probabilities add up to this."""
    seed: int = 0
    """continuations: seed of sampling."""
    threshold: float = 0.5
    """continuations: score from which a text counts as above."""
    harness: str | None = None
    """Tasks and groups of lm-eval by their names, or YAML files of tasks: one, or several with commas between them."""
    harness_include: Path | None = None
    """A folder with YAML files of additional tasks, which --harness can then name."""
    few_shot: int | None = at_least(0, None, most=WIDTH)
    """Few-shot examples before each question of the harness. Default: the task's number."""
    limit: int | None = at_least(1, None, most=TOKENS)
    """Evaluate only the first LIMIT questions of each task of the harness, for a quick test."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL, such as 4x2, as DATAxSTAGExMODEL, or by name: data=4,model=2."""
    overlap: int | None = at_least(1, None, most=WIDTH)
    """Tokens that are scored in each window of a text after the first; the paper scores 32 of 1,024. Default: all."""
    sequence_length: int | None = at_least(2, None, most=WIDTH)
    """Most tokens per window. Default: the model's sequence length."""
    rows: int = at_least(1, 8, most=WIDTH)
    """Batch size (windows or passages) per data-parallel rank."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of matrix multiplications."""
    attention: Literal["auto", "xla", "blocks", "cudnn"] = "auto"
    """Attention kernel."""
    sequence_parallel: bool = False
    """Sequence parallelism: shard activations over `model` between matrix multiplications, for less memory."""
    tokenizer: str | None = None
    """KIND:PATH of the tokenizer. Default: the one that came with the weights."""
    out: Path | None = None
    """JSON file for the results. Finished rows are saved next to it, so that the same command continues an interrupted
    evaluation."""
    config: str | None = None
    """A config that describes the model in a megatron folder, if the folder does not."""
    coordinator: str | None = None
    """host:port of process 0, for several processes that were not started by torchrun, Slurm, MPI or Kubernetes."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes; requires --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Number of this process, from 0; requires --coordinator."""
    compile_cache: str | None = None
    """Folder in which compiled programs are cached, or off. Default: $JAX_COMPILATION_CACHE_DIR, else a folder in
    ~/.cache."""

    def check(self) -> None:
        """Checks that the options are complete and compatible.

        Raises:
          UserError: they are not.
        """
        if (self.task is None) == (self.harness is None):
            missing = "--task is missing: name a task, or tasks of lm-eval with --harness"
            raise UserError("--task and --harness cannot be combined: remove one of them" if self.task else missing)
        of_tasks, of_harness = ("data", "overlap"), ("harness_include", "few_shot", "limit")
        idle = [name for name in (of_tasks if self.harness else of_harness) if getattr(self, name) is not None]
        if idle:
            required = "--task" if self.harness else "--harness"
            raise UserError(f"--{idle[0].replace('_', '-')} has no effect without {required}: remove it")
        self._check_neighbours()
        if self.task and self.data is None and self.neighbours is None:
            raise UserError(f"--data is missing: name the file of {self.task}")
        self._check_continuations()

    def _check_neighbours(self) -> None:
        """Checks that --neighbours is given with --task perplexity, and without options of other texts.

        Raises:
          UserError: it is not.
        """
        if self.neighbours is None:
            return
        if self.task != "perplexity":
            raise UserError(f"--neighbours {self.neighbours} has no effect without --task perplexity: remove it")
        for name in ("data", "overlap", "sequence_length", "config"):
            if (value := getattr(self, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{option} {value} has no effect with --neighbours, which is for the run's own validation samples: "
                    f"remove {option}"
                )

    def _check_continuations(self) -> None:
        """Checks that the options of continuations are given with it, and no others.

        Raises:
          UserError: they are not.
        """
        is_task, defaults = self.task == "continuations", Options("")
        other = ("overlap", "sequence_length", "attention", "sequence_parallel", "config", "coordinator")
        for name in other if is_task else OF_CONTINUATIONS:
            if getattr(self, name) != getattr(defaults, name):
                required = "another --task" if is_task else "--task continuations"
                raise UserError(f"--{name.replace('_', '-')} has no effect without {required}: remove it")
        if is_task and self.scorer is None:
            raise UserError("--scorer is missing: name a classifier, or a program as command:PROGRAM")


OF_CONTINUATIONS = ("scorer", "score_label", "samples", "max_tokens", "temperature", "top_p", "seed", "threshold")
