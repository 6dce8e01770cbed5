"""What `mtjax generate` reads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.config.field_metadata import Bound, at_least, setting
from mtjax.generate.request import Sampling
from mtjax.theory.decoding import REPORTED

DESCRIPTION = """Writes text with a trained model: GPT and Llama continue it, a T5 answers it, a BERT fills [MASK].

Weights are a run (its newest checkpoint), one of its checkpoints or a converted folder; hf:DIR is a folder of Hugging
Face's, megatron:DIR a checkpoint of Megatron-LM's. Any mesh reads weights of any mesh.

Examples:
  mtjax generate --from runs/default-1 "The function returns"
  mtjax generate --from hf:SmolLM2 --interactive
  mtjax generate --from runs/default-1 --temperature 0.8 --top-p 0.95 --samples 3 --seed 7 "The "
  mtjax generate --from hf:gpt2 --input prompts.jsonl --output texts.jsonl --batch 32
  mtjax generate --from hf:bert-base-uncased "The capital of France is [MASK]."
  mtjax generate --from hf:llama --mesh 1x4 --show-logprobs < prompt.txt
"""


@dataclass(frozen=True)
class Options:
    """Which weights, which prompts, and how."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR|KIND:DIR")]
    """Weights to read."""
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Texts to continue; standard input, as one text, when none is given."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL: heads, MLP, vocabulary and cache are split over the model ways."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of matrices, activations and cache; bfloat16 on GPUs and float32 on CPUs when not given."""
    weights_dtype: Literal["int8"] | None = None
    """Keep the matrices of layers and logits in 8 bits, with a scale for each output; --dtype is that of products."""
    tokenizer: str | None = None
    """A tokenizer as `mtjax train` takes it; the weights' own when not given."""
    batch: int = at_least(1, 8, most=4096)
    """Texts that are written at a time."""
    samples: int = at_least(1, 1, most=2**20)
    """Texts for each prompt, each with a seed of its own: that of the first is --seed, of the next one more."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A string that ends a text, besides the end of a document; it is left out. May be given several times."""
    ignore_eos: bool = False
    """Go on after the end of a document."""
    echo: bool = False
    """Show the prompt too."""
    show_logprobs: bool = False
    """Show each token in a colour from red, improbable, to green; not on a terminal, each on a line with its
    log-probability."""
    input: Path | None = None
    """A JSONL file of objects with `prompt`, and any settings of --temperature and the like that differ there."""
    output: Path | None = None
    """Where texts of --input go, as JSONL: `index` is the number of the input's line. If it exists, what is in it is
    not written again, provided that the same weights and settings made it: OUTPUT.settings.json tells."""
    overwrite: bool = False
    """Write --output anew if it exists."""
    logprobs: bool = False
    """With --output: also each token's text, id and log-probability."""
    interactive: bool = False
    """Chat, by the tokenizer's chat_template; without one, continue each line that is typed."""
    system: str | None = None
    """With --interactive: the first message, which tells the model what it is."""
    fillings: int | None = at_least(1, None, most=REPORTED)
    """Of a BERT: how many of the most likely tokens are shown for each mask; 5 when not given."""
    beams: int | None = at_least(1, None, most=REPORTED // 2)
    """Search the texts that are most probable as a whole, this many side by side: those of --samples are the best."""
    length_penalty: float = setting(1.0, bound=Bound(lambda value: -100 <= value <= 100, "from -100 to 100"))
    """With --beams: a text's log-probability is divided by its length to the power of this; more favours long texts."""
    compile_cache: str | None = None
    """Folder where compiled programs are kept, as of `mtjax train`; off keeps none."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
