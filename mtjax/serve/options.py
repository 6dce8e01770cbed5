"""Options of `mtjax serve`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtjax.config.field_metadata import WIDTH, Bound, at_least, seconds, setting
from mtjax.config.storage import Storage

DESCRIPTION = """Serves a trained GPT, Llama or T5 over HTTP, with the APIs of OpenAI and of Megatron-LM.

Weights are named as for `mtjax generate`. A web page to try the model is at /, Prometheus metrics are at /metrics.
On SIGTERM or Ctrl-C the server rejects new requests and finishes those in flight. Needs the extra serve.

Examples:
  mtjax serve --from runs/default-1
  mtjax serve --from hf:SmolLM2 --name smollm2 --port 8080 --batch 16
  mtjax serve --from hf:llama --mesh 2x4 --host 0.0.0.0 --keys keys.txt
"""
KEYS = "MTJAX_API_KEYS"
"""Environment variable with API keys, separated by commas."""


@dataclass(frozen=True)
class Options:
    """Weights, address, limits and processes."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR|KIND:DIR")]
    """Weights to load."""
    name: str | None = None
    """Model name that clients put into requests. Default: the name of the weights' folder."""
    host: str = "127.0.0.1"
    """Address to listen on: the default accepts connections from this machine only, 0.0.0.0 or :: from anywhere."""
    port: int = setting(8000, bound=Bound(lambda value: 0 <= value < 2**16, "from 0 to 65535"))
    """Port to listen on; 0 chooses a free one."""
    keys: Path | None = None
    """File with API keys, one a line, in addition to those in the environment variable MTJAX_API_KEYS (separated by
    commas). Without any key, requests need no authentication."""
    mesh: str = "1x1"
    """Devices as DATAxMODEL: DATA replicas, in each of which attention heads, MLP, vocabulary and KV cache are sharded
    over the tensor parallel degree MODEL."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of matrices, activations and KV cache. Default: bfloat16 on GPUs, float32 on CPUs."""
    storage: tyro.conf.OmitArgPrefixes[Storage] = field(default_factory=Storage)
    tokenizer: str | None = None
    """A tokenizer, named as for `mtjax train`. Default: the tokenizer that comes with the weights."""
    batch: int = at_least(1, 8, most=4096)
    """Maximum number of sequences that each replica generates at a time (continuous batching)."""
    state_snapshots: int | None = at_least(0, None, most=2**16)
    """Models with Mamba-2 or gated delta nets: maximum number of snapshots of their recurrent states that each replica
    keeps, from which prompts with the same beginning continue; each takes as much memory as the state of a sequence.
    Default: 2 for each sequence of --batch."""
    most_waiting: int = at_least(0, 256, most=2**20)
    """Maximum number of texts that wait in the queue; requests beyond it get HTTP status 429."""
    most_tokens: int | None = at_least(1, None, most=2**24)
    """Maximum number of generated tokens for each text. Default: limited by the model's context length only."""
    most_body: int = at_least(1024, 4 << 20, most=1 << 30)
    """Maximum size of a request's body in bytes."""
    most_seconds: float = seconds(600.0)
    """Timeout of a request in seconds, including the time in the queue."""
    drain_seconds: float = seconds(30.0)
    """Seconds to finish requests in flight after SIGTERM; the remaining ones are then cancelled."""
    coordinator: str | None = None
    """host:port of process 0, for multiple processes that were not started by torchrun, Slurm, MPI or Kubernetes.
    Clients connect to process 0 (--host, --port)."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes that the mesh spans; requires --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Index of this process, from 0; requires --coordinator."""
    peer_timeout: float = seconds(30.0)
    """Seconds after which all processes exit if one of them is lost."""
    compile_cache: str | None = None
    """Folder for the persistent compilation cache, as for `mtjax train`; off disables it."""
