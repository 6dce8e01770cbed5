"""`python -m mtjax.convert`, also `mtjax convert`: weights to and from other formats."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import HEADS, LAYERS, TOKENS, WIDTH, above_zero, at_least
from mtjax.convert.weights_path import ADAPTERS, parse_weights_path
from mtjax.errors import UserError, first_line

if TYPE_CHECKING:
    import numpy as np

    from mtjax.convert.compress import Quantization
    from mtjax.convert.stream import Sink, WeightSource

DESCRIPTION = """Converts weights to and from Hugging Face's safetensors and Megatron-LM's checkpoints.

Source and target are KIND:DIR. Kinds:
  hf        a folder with config.json and *.safetensors, as save_pretrained writes and from_pretrained reads; read
            also: a model on the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, which is downloaded
  mtjax     a run (its newest checkpoint), one of its checkpoints, or a converted folder; written: a converted folder
  peft      read: adapters (LoRA) that peft saved, merged into their base model, which adapter_config.json names;
            written: the adapters of a run of mtjax finetune --lora-rank; other kinds get them merged
  megatron  GPT, Llama, hybrid models, Retro, the legacy code's BERT: a folder with latest_checkpointed_iteration.txt,
            or one of its iterations, in Megatron's format torch (mp_rank_*/model_optim_rng.pt) or, for GPT, Llama and
            hybrid models, torch_dist (.metadata and *.distcp)
  torchtitan  read only: Llama, a folder with step-N, or one of these; needs --config, which describes the model

Examples:
  mtjax convert --from hf:gpt2 --to mtjax:gpt2-weights
  mtjax convert --from hf:HuggingFaceTB/SmolLM2-135M --to mtjax:smollm2
  mtjax train --config gpt2-weights/config.toml --init-from gpt2-weights --data book.txt
  mtjax convert --from mtjax:runs/default-1 --to hf:my-model --dtype bfloat16
  mtjax convert --from megatron:ckpt --to hf:my-model --vocab-size 50257
  mtjax convert --from mtjax:runs/default-1 --to megatron:ckpt --tensor 2 --pipeline 2
  mtjax convert --from hf:llama --to megatron:ckpt --tensor 8 --transformer-impl local
  mtjax convert --from mtjax:runs/default-1 --to megatron:ckpt --ckpt-format torch_dist
  mtjax convert --from mtjax:runs/chat-1 --to peft:my-adapters
  mtjax convert --from peft:my-adapters --to hf:merged
  mtjax convert --from megatron:ckpt --to mtjax:runs/continued --with-optimizer
  mtjax convert --from mtjax:runs/continued --to megatron:ckpt-2 --ckpt-format torch_dist --with-optimizer

A conversion and its reverse give bit-identical weights. Memory use is a few times the largest tensor, whatever the
size of the model. DIR after --to must be new; it appears only when it is complete.
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax convert`."""

    source: Annotated[str | None, tyro.conf.arg(name="from", metavar="[KIND:]DIR")] = None
    """The weights to read; without KIND, what the folder holds decides."""
    target: Annotated[str | None, tyro.conf.arg(name="to", metavar="KIND:DIR")] = None
    """The folder to write."""
    show: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Convert nothing: print what a folder holds, with the name, type, shape and shards of every array."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights in an hf or megatron folder that is written. Default: that of the source, float32 for a run.
    An mtjax folder is always float32."""
    vocab_multiple: int | None = at_least(1, None, most=WIDTH)
    """Pad mtjax's vocabulary to a multiple of this (divisible by the mesh's tensor parallel degree).
    Default: 1024."""
    vocab_size: int | None = at_least(1, None, most=TOKENS)
    """Size of the vocabulary of a megatron folder, which may contain only the padded size."""
    config: str | None = None
    """A config that describes the model in a megatron folder, if the folder does not, or in a torchtitan folder."""
    ckpt_format: Literal["torch", "torch_dist"] = "torch"
    """Format of a megatron folder that is written: torch has a file for each rank of --tensor, --pipeline and --expert;
    torch_dist, Megatron-LM's default, is loaded with any degrees."""
    tensor: int = at_least(1, 1, most=HEADS)
    """Tensor-parallel ranks of a megatron folder that is written."""
    pipeline: int = at_least(1, 1, most=LAYERS)
    """Pipeline stages of a megatron folder that is written."""
    expert: int = at_least(1, 1, most=HEADS)
    """Expert-parallel ranks of a megatron folder that is written; each has its share of the experts, and all other
    parameters. With --with-optimizer, of the run that goes on, for above 1 Megatron-LM has an optimizer for experts."""
    grouped_experts: bool = False
    """Write the experts of a rank as one module, for Megatron-LM's --moe-grouped-gemm with Transformer Engine. Default:
    each expert is a separate module."""
    checkpoint_version: Literal[0, 1, 2, 3] = 3
    """Format version of a megatron folder that is written; older versions of Megatron-LM read 0 to 2."""
    transformer_impl: Literal["legacy", "local", "transformer_engine"] | None = None
    """Names of the tensors in a megatron folder that is written: local and transformer_engine are Megatron-Core's,
    which reads them with the same --transformer-impl and --ckpt-format torch; legacy is that of the code before it.
    Default: transformer_engine, or legacy for a BERT or an older --checkpoint-version."""
    without_encoder: bool = False
    """Write the decoder of a Retro as a GPT, without the encoder and chunked cross-attention."""
    with_encoder: Annotated[Path | None, tyro.conf.arg(metavar="CONFIG")] = None
    """Write a GPT as the decoder of a Retro with the retro settings of this config (TOML); the encoder and chunked
    cross-attention are drawn with its seed."""
    with_optimizer: bool = False
    """Between megatron and mtjax, convert also the optimizer's state, the schedules and the position in the data: the
    run goes on where it stopped. An mtjax folder is then a run's, for mtjax train --resume."""
    quantize: Literal["int8", "int4", "fp8"] | None = None
    """Quantize the matrices of a decoder's layers in an hf folder that is written, in the layouts that transformers
    loads with compressed-tensors: int8 and fp8 with a scale for each output channel, int4 with one for each group of
    --group-size inputs."""
    group_size: int = at_least(2, 128, most=WIDTH)
    """With --quantize int4: inputs that share a scale; divides the inputs of each matrix."""
    zero_point: bool = False
    """With --quantize int4: a zero point for each scale, for weights that are not symmetric around 0."""
    calibration: Path | None = None
    """With --quantize int4 or int8: a text file; weights are rounded by GPTQ, so that the errors of products with the
    inputs that the text leads to are small. Default: each weight is rounded to the nearest value."""
    calibration_samples: int = at_least(1, 128, most=2**16)
    """With --calibration: windows of 512 tokens that are read from it."""
    max_shard_gb: float = above_zero(5.0)
    """Largest safetensors file, in 10^9 bytes; a larger model is written as several files, with an index."""


_NEXT = {
    "mtjax": "mtjax train --config {0}/config.toml --resume",
    "megatron": "start Megatron-LM with --load {0} --use-distributed-optimizer --no-load-rng",
}
"""The command that goes on with a run that was converted with its optimizer."""
QUANTIZATION = ("quantize", "group_size", "zero_point", "calibration", "calibration_samples")
"""Options of weights that are written in fewer bits."""
WITH_RANKS = {"tensor", "pipeline", "expert", "grouped_experts", "checkpoint_version"}
"""Options of a megatron folder in the format torch, which has a file for each rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_main(lambda: run(read(Options, argv, "mtjax convert", DESCRIPTION)))


def run(options: Options) -> None:
    """Converts weights, or shows a folder.

    Raises:
      UserError: source or target is not KIND:DIR, the weights can't be converted, or the target exists.
    """
    if options.show is not None:
        _show(options)
        return
    if options.source is None or options.target is None:
        raise UserError(
            "give --from [KIND:]DIR and --to KIND:DIR, or --show DIR (mtjax convert --help lists the options)"
        )
    to_kind, target_path = parse_weights_path(options.target, is_target=True)
    from mtjax.convert.recognized import source_of  # imports jax, for a second

    from_kind, source_path = source_of(options.source)
    check_options(options, from_kind, to_kind)
    check_format(options, to_kind)
    import jax  # after the options are checked: the import takes a second

    jax.config.update("jax_platforms", "cpu")  # nothing is computed on a GPU: don't allocate memory there
    from mtjax.convert.mtjax_folder import describe_continued_training
    from mtjax.convert.peft import write_adapters
    from mtjax.convert.saved_model import Hints, open_source
    from mtjax.convert.stream import convert, new_folder, tokenizer_to_write
    from mtjax.convert.to_megatron import newest_checkpoint

    start = time.monotonic()
    # Everything is written into a temporary folder, so that an error, or Ctrl-C, leaves no half of a model under its
    # name.
    with new_folder(target_path) as folder:
        hints = Hints(options.vocab_multiple, options.vocab_size, options.config)
        if options.with_optimizer and from_kind == "mtjax":
            source_path = newest_checkpoint(source_path)
        source = _with_or_without_encoder(open_source(from_kind, source_path, hints), options)
        _print_notes(source, to_kind, options)
        if to_kind in ("mtjax", "megatron"):
            # A tokenizer that can't be read is an error before any weights are written.
            tokenizer_to_write(source.origin)
        if to_kind == ADAPTERS:
            numbers = write_adapters(source, folder)
        elif options.with_optimizer:
            numbers = _continue_elsewhere(to_kind, folder, target_path, source, options)
        else:
            compression = _compression(options)
            sink = _open_sink(to_kind, folder, target_path, source, options, compression)
            if compression and compression.is_calibrated:  # after the sink has checked the options and the model
                compression.moments.update(_moments(options, f"{from_kind}:{source_path}"))
            numbers = convert(source, sink, f"converting {source_path.name}")
    print(f"{numbers / 1e6:,.1f}M parameters in {target_path} ({time.monotonic() - start:.0f} s)")
    if options.with_optimizer:
        print(f"next    {_NEXT[to_kind].format(target_path)}{_expert_parallelism(source, to_kind, options.expert)}")
    elif to_kind == "mtjax":
        print(f"note    {describe_continued_training(source.origin.config.model)}")
        more = " --neighbours PREFIX" if source.origin.config.model.family == "retro" else ""
        print(f"next    mtjax train --config {target_path / 'config.toml'} --init-from {target_path} --data TEXT{more}")


def _with_or_without_encoder(source: "WeightSource", options: Options) -> "WeightSource":
    """Returns the weights of a Retro as a GPT's, those of a GPT as a Retro's, or as they are."""
    if options.without_encoder:
        from mtjax.families.retro.to_gpt import DecoderSource

        return DecoderSource(source)
    if options.with_encoder is not None:
        from mtjax.families.retro.from_gpt import RetroSource

        return RetroSource(source, options.with_encoder)
    return source


def _print_notes(source: "WeightSource", to_kind: str, options: Options) -> None:
    from mtjax.families.retro.megatron_arguments import retro_note

    for note in source.origin.notes:
        print(note.partition("; --with-optimizer")[0] if options.with_optimizer else note)
    if to_kind == "megatron" and (other := retro_note(source.origin.config.model)):
        print(f"note    {other}")


def _expert_parallelism(source: "WeightSource", to_kind: str, degree: int) -> str:
    """Returns how experts must be divided where a run goes on, for the end of a line."""
    if to_kind != "megatron" or not source.origin.config.model.num_experts:
        return ""
    return f" --expert-model-parallel-size {degree}" if degree == 1 else " and any --expert-model-parallel-size above 1"


def check_options(options: Options, from_kind: str, to_kind: str) -> None:
    """Checks that every given option has an effect with these kinds.

    Raises:
      UserError: an option has no effect.
    """
    idle = set() if to_kind == "megatron" else {*WITH_RANKS, "ckpt_format", "transformer_impl"}
    idle |= set() if from_kind == "megatron" else {"vocab_size"}
    idle |= set() if from_kind in ("megatron", "torchtitan") else {"config"}
    idle |= {"dtype"} if to_kind in ("mtjax", ADAPTERS) else set()
    idle |= set() if to_kind == "hf" else {"max_shard_gb", *QUANTIZATION}
    # Only between these two is an optimizer's state converted.
    idle |= set() if {from_kind, to_kind} == {"mtjax", "megatron"} else {"with_optimizer"}
    idle |= set() if to_kind == "mtjax" and from_kind != "mtjax" else {"vocab_multiple"}
    for field in dataclasses.fields(Options):
        if field.name in idle and getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise UserError(f"--{name} has no effect on a conversion from {from_kind} to {to_kind}: remove it")
    if options.without_encoder and options.with_optimizer:
        raise UserError("--without-encoder writes a gpt, and --with-optimizer goes on with a retro: remove one of them")
    if options.with_encoder is not None and (options.without_encoder or options.with_optimizer):
        other = "--without-encoder" if options.without_encoder else "--with-optimizer"
        raise UserError(
            f"--with-encoder makes a retro of a gpt, and does not go along with {other}: remove one of them"
        )
    check_quantization(options)


def check_quantization(options: Options) -> None:
    """Checks that the options of --quantize have an effect with its value.

    Raises:
      UserError: one has none.
    """
    kinds = {"group_size": ("int4",), "zero_point": ("int4",), "calibration": ("int4", "int8")}
    for name, values in kinds.items():
        if options.quantize not in values and getattr(options, name) != getattr(Options(), name):
            kind = " or ".join(values)
            raise UserError(f"--{name.replace('_', '-')} needs --quantize {kind}: add that, or remove it")
    if options.calibration is None and options.calibration_samples != Options().calibration_samples:
        raise UserError("--calibration-samples needs --calibration: add that, or remove it")


def _show(options: Options) -> None:
    """Prints the arrays of a folder.

    Raises:
      UserError: its content is not known, or other options are given.
    """
    from mtjax.convert.recognized import named_folder
    from mtjax.convert.shown_arrays import show

    assert options.show is not None
    given = [f for f in dataclasses.fields(Options) if getattr(options, f.name) != f.default and f.name != "show"]
    if given:
        name = {"source": "from", "target": "to"}.get(given[0].name, given[0].name.replace("_", "-"))
        raise UserError(f"--{name} has no effect with --show: remove it")
    for line in show(named_folder(options.show)):
        print(line)


def check_format(options: Options, to_kind: str) -> None:
    """Checks that no option of the format torch is given with torch_dist.

    Raises:
      UserError: names one.
    """
    if options.with_optimizer and to_kind == "megatron" and options.ckpt_format != "torch_dist":
        raise UserError("--with-optimizer writes only --ckpt-format torch_dist: add it")
    given = [field for field in dataclasses.fields(Options) if getattr(options, field.name) != field.default]
    for field in given:
        idle = WITH_RANKS - ({"expert"} if options.with_optimizer else set())
        if options.ckpt_format != "torch" and field.name in idle:
            raise UserError(
                f"--{field.name.replace('_', '-')} has no effect with --ckpt-format {options.ckpt_format}, which "
                "Megatron-LM loads with any degrees: remove it"
            )


def _compression(options: Options) -> "Quantization | None":
    """Returns how weights are quantized, without the moments of a calibration; None if they are not."""
    if options.quantize is None:
        return None
    from mtjax.convert.compress import Quantization

    is_calibrated = options.calibration is not None
    return Quantization(options.quantize, options.group_size, options.zero_point, is_calibrated)


def _moments(options: Options, source: str) -> "dict[tuple[str, int], np.ndarray]":
    """Runs the model over the calibration text; returns `Quantization.moments`.

    Raises:
      UserError: the text can't be read, or is too short.
    """
    from mtjax.generate.moments import input_moments
    from mtjax.generate.weights import load_model

    assert options.calibration is not None
    try:
        text = options.calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--calibration {options.calibration} can't be read as text: {first_line(e)}") from e
    loaded = load_model(source, dtype="float32")
    return input_moments(loaded, loaded.tokenizer.encode(text), options.calibration_samples)


def _open_sink(
    kind: str,
    folder: Path,
    final: Path,
    source: "WeightSource",
    options: Options,
    compression: "Quantization | None" = None,
) -> "Sink":
    """Opens the sink for a kind; `folder` is temporary, and will be renamed to `final`."""
    from mtjax.convert.hugging_face import HuggingFaceSink
    from mtjax.convert.megatron import MegatronSink, Split
    from mtjax.convert.mtjax_folder import MtjaxSink
    from mtjax.convert.torch_dist_sink import TorchDistSink

    largest = int(options.max_shard_gb * 1e9)
    version = float(options.checkpoint_version)
    ranks, experts = (options.tensor, options.pipeline), (options.expert, options.grouped_experts)
    split = Split(*ranks, version, options.transformer_impl, *experts)
    # Functions, as only one of them is to be opened.
    openers: dict[str, Callable[[], Sink]] = {
        "hf": lambda: HuggingFaceSink(folder, source.origin, source.parameters, options.dtype, largest, compression),
        "mtjax": lambda: MtjaxSink(folder, source.origin, final),
        "megatron": lambda: MegatronSink(folder, source.origin, source.parameters, split, options.dtype),
        "torch_dist": lambda: TorchDistSink(
            folder, source.origin, source.parameters, options.transformer_impl, options.dtype
        ),
    }
    return openers[options.ckpt_format if options.ckpt_format == "torch_dist" else kind]()


def _continue_elsewhere(kind: str, folder: Path, final: Path, source: "WeightSource", options: Options) -> int:
    """Converts a run with the state of its optimizer; returns the number of weights."""
    from mtjax.convert.continued import MegatronRun
    from mtjax.convert.megatron import MegatronSource
    from mtjax.convert.mtjax_folder import MtjaxSource
    from mtjax.convert.run_folder import RunSink
    from mtjax.convert.to_megatron import MtjaxRun
    from mtjax.convert.torch_dist_sink import TorchDistSink

    task = f"converting {str(options.source).rpartition(':')[2]}"
    if kind == "megatron":
        assert isinstance(source, MtjaxSource)
        ours = MtjaxRun(source, options.expert)
        given = options.transformer_impl, options.dtype or ours.dtype
        return ours.write(TorchDistSink(folder, source.origin, source.parameters, *given, ours.step), task)
    assert isinstance(source, MegatronSource)
    theirs = MegatronRun(source, final)
    for note in theirs.notes:
        print(f"note    {note}")
    numbers = theirs.write(RunSink(folder, source.origin, final, theirs.config, theirs.counters), task)
    if theirs.report:
        print(theirs.report, file=sys.stderr)
    return numbers


if __name__ == "__main__":
    sys.exit(main())
