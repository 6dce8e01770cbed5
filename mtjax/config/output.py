"""`[output]`: what the run leaves behind, and how often."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.config.field_metadata import at_least


@dataclass(frozen=True)
class Output:
    """What the run leaves behind, and how often."""

    out: Path | None = None
    """Folder of the run; runs/NAME-N with the next free N when not given."""
    resume: bool = False
    """Continue from the last good checkpoint in --out, or of the newest run of this name."""
    log_every: int = at_least(1, 10)
    """Steps between log lines."""
    valid_every: int = at_least(0, 1000)
    """Steps between validations; 0 never validates."""
    valid_batches: int = at_least(1, 10)
    """Global batches of held-out text in a validation."""
    evaluate: tuple[str, ...] | None = None
    """Tasks of mtjax evaluate that the model is asked on the way: TASK=FILE, say wikitext103=wiki.tokens
    lambada=dev.jsonl."""
    evaluate_every: int = at_least(1, 1000)
    """Steps between asking them; the last step is followed by it, too."""
    keep_best: str | None = None
    """Keep the best checkpoint in --out's best, by valid_loss or by TASK/RESULT of --evaluate, say lambada/accuracy."""
    checkpoint_every: int = at_least(0, 1000)
    """Steps between checkpoints; 0 saves at the end only."""
    max_failed_saves: int = at_least(0, 2)
    """Saves in a row that may fail, say of a full disk, before the run ends; its last one must not."""
    keep_last: int = at_least(1, 3)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = at_least(1, None)
    """Also keep each checkpoint whose step is a multiple of this."""
    local_checkpoints: Path | None = None
    """Folder on each machine's own disk for frequent checkpoints, besides those in --out: see docs/operate.md."""
    local_every: int = at_least(1, 100)
    """Steps between checkpoints in --local-checkpoints."""
    local_keep: int = at_least(2, 2)
    """Number of newest checkpoints to keep there: the one before stays while one is written."""
    prompt: str = "The "
    """Text that the trained model continues in the summary."""
