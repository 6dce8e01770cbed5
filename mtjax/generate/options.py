"""Options of `mtjax generate`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.analysis.decoding import REPORTED
from mtjax.config.field_metadata import Bound, at_least, setting
from mtjax.config.storage import Storage
from mtjax.errors import UserError
from mtjax.generate.request import Sampling

DESCRIPTION = """Generates text with a trained model: GPT and Llama continue a prompt, T5 answers it, BERT fills [MASK].

Weights come from a run (its newest checkpoint), one of its checkpoints or a converted folder; hf:DIR is a Hugging Face
folder, peft:DIR one with adapters of peft, which names its base model, and megatron:DIR a Megatron-LM checkpoint. The
mesh may differ from the one the model was trained on.

Examples:
  mtjax generate --from runs/default-1 "The function returns"
  mtjax generate --from hf:SmolLM2 --interactive
  mtjax generate --from runs/default-1 --temperature 0.8 --top-p 0.95 --samples 3 --seed 7 "The "
  mtjax generate --from hf:gpt2 --input prompts.jsonl --output texts.jsonl --batch 32
  mtjax generate --from runs/default-1 --documents 1000 --output texts.jsonl --top-p 0.9 --max-tokens 500
  mtjax generate --from runs/retro-1 --retrieve near/books --sources "The whale "
  mtjax generate --from hf:bert-base-uncased "The capital of France is [MASK]."
  mtjax generate --from hf:llama --mesh 1x4 --show-logprobs < prompt.txt
"""


@dataclass(frozen=True)
class Options:
    """Weights, prompts and generation options."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR|KIND:DIR")]
    """Weights to load."""
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Prompts; if none is given, standard input is read as a single prompt."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL: attention heads, MLP, vocabulary and KV cache are sharded over the tensor parallel degree
    MODEL, and replicated over DATA."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of matrices, activations and KV cache. Default: bfloat16 on GPUs, float32 on CPUs."""
    storage: tyro.conf.OmitArgPrefixes[Storage] = field(default_factory=Storage)
    tokenizer: str | None = None
    """A tokenizer, named as for `mtjax train`. Default: the tokenizer that comes with the weights."""
    batch: int = at_least(1, 8, most=4096)
    """Maximum number of sequences that are generated at a time (continuous batching)."""
    state_snapshots: int | None = at_least(0, None, most=2**16)
    """Models with Mamba-2 or gated delta nets: maximum number of snapshots of their recurrent states, from which
    prompts with the same beginning continue; each takes as much memory as the state of a sequence. Default: 2 for each
    sequence of --batch."""
    samples: int = at_least(1, 1, most=2**20)
    """Number of texts for each prompt. The first one uses --seed, each further one the next seed."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A stop sequence: ends the text, in addition to the end-of-text token, and is not part of it. May be given several
    times."""
    ignore_eos: bool = False
    """Continue after the end-of-text token."""
    echo: bool = False
    """Print the prompt before the text."""
    show_logprobs: bool = False
    """Color each token by its probability, from red (low) to green (high); if the output is not a terminal, print one
    token a line with its log-probability."""
    input: Path | None = None
    """JSONL file of objects with `prompt`, and optionally `stop` and sampling parameters that override the options for
    that prompt. A retro also reads `neighbours`, a list of texts for each chunk of the prompt, or `passages`, a list of
    texts that the answer reads."""
    retrieve: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PREFIX")]] = ()
    """retro: search the neighbours of each chunk of the prompt and of the text as it is complete. PREFIX is the one
    that mtjax data neighbours wrote: its training text, index and embedder are used. Or a corpus with the embeddings
    of mtjax data embed, which is searched exactly; may then be given several times."""
    embedder: str | None = None
    """With --retrieve: the embedder that made the database, if it has moved: hf:DIR or a run."""
    without_document: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[CORPUS:]NUMBER")]
    ] = ()
    """With --retrieve: read no chunks of this document of the database, from 0, such as the one that the prompt comes
    from. May be given several times; --input lines may have others as `without_documents`, a list."""
    sources: bool = False
    """With --retrieve: print after each text which documents were read; with --output, write them as `sources`."""
    documents: int | None = at_least(1, None, most=2**31)
    """Write this many texts from the start of a document to --output, instead of texts for the prompts of --input."""
    output: Path | None = None
    """JSONL file for the texts of --input: `index` is the line number of the prompt, from 0. If the file exists,
    generation continues after the texts that it has, provided that they were generated with the same weights and
    options (recorded in OUTPUT.settings.json)."""
    overwrite: bool = False
    """Replace --output if it exists."""
    logprobs: bool = False
    """With --output: also write each token's text, id and log-probability."""
    interactive: bool = False
    """Chat, using the tokenizer's chat_template; without a chat_template, continue each line that you type."""
    system: str | None = None
    """With --interactive: the system message."""
    fillings: int | None = at_least(1, None, most=REPORTED)
    """BERT: number of most likely tokens to print for each mask. Default: 5."""
    # A step needs twice as many candidates as beams, and the sampler reports REPORTED.
    beams: int | None = at_least(1, None, most=REPORTED // 2)
    """Use beam search with this many beams; --samples is the number of best texts to print."""
    length_penalty: float = setting(1.0, bound=Bound(lambda value: -100 <= value <= 100, "from -100 to 100"))
    """With --beams: exponent of the text's length, by which its log-probability is divided; larger values favor longer
    texts."""
    compile_cache: str | None = None
    """Folder for the persistent compilation cache, as for `mtjax train`; off disables it."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)


OF_ENGINES = ("storage", "state_snapshots", "beams", "documents", "length_penalty", "interactive", "echo")
"""Options that need a KV cache or the engine."""
OF_RETRIEVAL = ("retrieve", "embedder", "without_document", "sources")
"""Options of `--retrieve`."""


def refuse(options: Options, names: Iterable[str], why: str) -> None:
    """Refuses options that are given.

    Raises:
      UserError: one of them is not the default; begins with `why`.
    """
    # Compared with the defaults, as tyro does not tell which options were given: naming a default is allowed.
    defaults = Options(options.source)
    if name := next((name for name in names if getattr(options, name) != getattr(defaults, name)), None):
        option = "sampling parameters such as --temperature" if name == "sampling" else f"--{name.replace('_', '-')}"
        raise UserError(f"{why} and does not support {option}: remove it")
