"""What `mtjax serve` reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.config.field_metadata import WIDTH, Bound, at_least, seconds, setting

DESCRIPTION = """Serves a trained GPT or Llama over HTTP, as clients of OpenAI and of Megatron-LM ask for texts.

Weights are named as for `mtjax generate`. There is a page to try it at /, and numbers for Prometheus at /metrics.
SIGTERM and Ctrl-C finish what is under way, and take nothing more. Needs the extra serve.

Examples:
  mtjax serve --from runs/default-1
  mtjax serve --from hf:SmolLM2 --name smollm2 --port 8080 --batch 16
  mtjax serve --from hf:llama --mesh 2x4 --host 0.0.0.0 --keys keys.txt
"""
KEYS = "MTJAX_API_KEYS"
"""Variable of the environment with API keys, separated by commas."""


@dataclass(frozen=True)
class Options:
    """Which weights, for whom, and how much of them."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR|KIND:DIR")]
    """Weights to read."""
    name: str | None = None
    """Under which clients ask for the model; the weights' folder when not given."""
    host: str = "127.0.0.1"
    """Address to listen at: this machine alone hears the default, everybody 0.0.0.0 or ::."""
    port: int = setting(8000, bound=Bound(lambda value: 0 <= value < 2**16, "from 0 to 65535"))
    """Port to listen at; 0 takes a free one."""
    keys: Path | None = None
    """File with API keys, a line each, besides those of the variable MTJAX_API_KEYS (separated by commas). Without any
    key everybody may ask."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL: heads, MLP, vocabulary and cache are split over the model ways; each data way is a replica
    with texts of its own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of matrices, activations and cache; bfloat16 on GPUs and float32 on CPUs when not given."""
    weights_dtype: Literal["int8"] | None = None
    """Keep the matrices of layers and logits in 8 bits, with a scale for each output; --dtype is that of products."""
    tokenizer: str | None = None
    """A tokenizer as `mtjax train` takes it; the weights' own when not given."""
    batch: int = at_least(1, 8, most=4096)
    """Texts that are written at a time by each replica."""
    most_waiting: int = at_least(0, 256, most=2**20)
    """Texts that wait for their turn; beyond them requests are answered with 429."""
    most_tokens: int | None = at_least(1, None, most=2**24)
    """Tokens of a text; as many as the model's context has room for when not given."""
    most_body: int = at_least(1024, 4 << 20, most=1 << 30)
    """Bytes of a request."""
    most_seconds: float = seconds(600.0)
    """For a request, waiting included."""
    drain_seconds: float = seconds(30.0)
    """For what is under way at SIGTERM; then it is cut off."""
    coordinator: str | None = None
    """host:port of process 0, for several processes that were not started by torchrun, Slurm, MPI or Kubernetes.
    Clients ask process 0 (--host, --port)."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes, which share the mesh; goes with --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Number of this process, from 0; goes with --coordinator."""
    peer_timeout: float = seconds(30.0)
    """Seconds within which all processes end when one of them is lost."""
    compile_cache: str | None = None
    """Folder where compiled programs are kept, as of `mtjax train`; off keeps none."""
