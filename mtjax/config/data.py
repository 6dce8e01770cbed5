"""`[data]`: what the model reads."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.config.field_metadata import at_least, seconds


@dataclass(frozen=True)
class Data:
    """What the model reads."""

    data: str | None = None
    """Text (JSON lines, plain text, CSV, Parquet and Arrow files, also compressed; globs and folders), a Megatron
    PREFIX of .bin and .idx, or a blend like '0.3 A 0.7 B'; when not given, the documentation that comes with Python."""
    train_data: str | None = None
    """Training data only, like --data but not split; goes with --valid-data and --test-data."""
    valid_data: str | None = None
    """Validation data, when it is not a share of --data."""
    test_data: str | None = None
    """Test data, when it is not a share of --data."""
    tokenizer: str | None = None
    """A tokenizer.json, a Hugging Face folder, a folder with GPT-2's encoder.json and vocab.bpe, or KIND:PATH with the
    kind gpt2, bert, hf or sentencepiece; when not given, one trained on the text."""
    text_key: str | None = None
    """Key of the JSON objects, or column of the tables, with the text; a.b is the key b inside a. When not given, text;
    CSV and TSV files need it."""
    eod_token: str | None = None
    """The token that ends documents, such as '<eos>'; when not given, the one that the tokenizer's files name."""
    parse_special: bool = False
    """Read names of special tokens in the text as these tokens, for corpora in a chat format; otherwise they are plain
    text."""
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
