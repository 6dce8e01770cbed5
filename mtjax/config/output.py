"""`[output]`: the run's folder, logging, validation and checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.config.field_metadata import at_least


@dataclass(frozen=True)
class Output:
    """The run's folder, logging, validation and checkpoints."""

    out: Path | None = None
    """Folder of the run, with its checkpoints and logs (compare Megatron's --save); runs/NAME-N with the next free N
    when not given."""
    resume: bool = False
    """Resume from the last good checkpoint in --out, or of the newest run with this config's name (compare Megatron's
    --load)."""
    log_every: int = at_least(1, 10)
    """Steps between log lines (Megatron's --log-interval)."""
    valid_every: int = at_least(0, 1000)
    """Steps between validations (Megatron's --eval-interval); 0 turns validation off."""
    valid_batches: int = at_least(1, 10)
    """Global batches of validation data per validation (Megatron's --eval-iters)."""
    evaluate: tuple[str, ...] | None = None
    """Tasks of mtjax evaluate to run during training, each as TASK=FILE, such as wikitext103=wiki.tokens
    lambada=dev.jsonl."""
    evaluate_every: int = at_least(1, 1000)
    """Steps between runs of the --evaluate tasks, which also run after the last step."""
    keep_best: str | None = None
    """Keep the best checkpoint in the folder best of --out, by valid_loss or by a result of --evaluate as TASK/RESULT,
    such as lambada/accuracy."""
    checkpoint_every: int = at_least(0, 1000)
    """Steps between checkpoints (Megatron's --save-interval); 0 saves only at the end."""
    max_failed_saves: int = at_least(0, 2)
    """Number of saves in a row that may fail, for example on a full disk, before the run ends with an error. The final
    save must not fail."""
    keep_last: int = at_least(1, 3)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = at_least(1, None)
    """Also keep every checkpoint whose step is a multiple of this."""
    local_checkpoints: Path | None = None
    """Folder on each machine's local disk for frequent checkpoints, in addition to those in --out: see
    docs/operate.md."""
    local_every: int = at_least(1, 100)
    """Steps between checkpoints in --local-checkpoints."""
    local_keep: int = at_least(2, 2)
    """Number of newest checkpoints to keep in --local-checkpoints: at least 2, so that one is complete while the next
    is written."""
    prompt: str = "The "
    """Prompt that the trained model continues in the summary at the end of the run."""
