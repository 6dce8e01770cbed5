"""`[data]`: what the model reads."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.config.field_metadata import at_least, seconds


@dataclass(frozen=True)
class Data:
    """What the model reads."""

    data: str | None = None
    """Text (FILE.txt, FILE.jsonl, also .gz and .zst, globs), a Megatron PREFIX of .bin and .idx, or a blend like
    '0.3 A 0.7 B'; when not given, the documentation that comes with Python."""
    train_data: str | None = None
    """Training data only, like --data but not split; goes with --valid-data and --test-data."""
    valid_data: str | None = None
    """Validation data, when it is not a share of --data."""
    test_data: str | None = None
    """Test data, when it is not a share of --data."""
    tokenizer: str | None = None
    """A tokenizer.json, a Hugging Face folder, a folder with GPT-2's encoder.json and vocab.bpe, or KIND:PATH with the
    kind gpt2, bert, hf or sentencepiece; when not given, one trained on the text."""
    split: str = "969,30,1"
    """Shares of the text for training, validation and test."""
    cache_dir: Path | None = None
    """Where prepared text is kept; ~/.cache/mtjax when not given."""
    num_workers: int = at_least(0, 0, most=256)
    """Processes that prepare samples; 0 prepares them in threads of the training process."""
    loader_timeout: float = seconds(300.0)
    """Seconds without a batch after which the loader counts as stalled, and the run ends with an error."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Keep attention within a document."""
    eod_mask_loss: bool = False
    """Leave tokens whose input is the end of a document out of the loss."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out the last validation sample of GPT when the text ends within it; otherwise it is padded, without loss on
    the padding."""
    add_extra_token_to_sequence: bool = True
    """Read one token more than a GPT sample has, as the label of its last token, which otherwise has no label."""
