"""`[data]`: training, validation and test data, and the tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.config.field_metadata import at_least, seconds

DOCUMENT_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Settings of samples that are divided where a document ends, with the end-of-document token; only decoders have such
samples."""


@dataclass(frozen=True)
class Data:
    """Training, validation and test data, and the tokenizer."""

    data: str | None = None
    """Text (JSON lines, plain text, CSV, Parquet and Arrow files, also compressed; globs and folders), a Megatron
    dataset PREFIX of .bin and .idx files, or a weighted blend such as '0.3 A 0.7 B' (Megatron's --data-path), also in
    several --data; when not given, the documentation of Python."""
    train_data: str | None = None
    """Training data only, in the format of --data but not divided by --split (Megatron's --train-data-path). Use it
    with --valid-data and --test-data."""
    valid_data: str | None = None
    """Separate validation data, instead of a share of --data."""
    test_data: str | None = None
    """Separate test data, instead of a share of --data."""
    tokenizer: str | None = None
    """A tokenizer.json, a Hugging Face folder, a folder with GPT-2's encoder.json and vocab.bpe, or KIND:PATH with KIND
    gpt2, bert, hf or sentencepiece; when not given, a tokenizer is trained on the text."""
    text_key: str | None = None
    """Key of the JSON objects, or column of the tables, that contains the text; a.b is the key b inside a. Default:
    text. Required for CSV and TSV files."""
    eod_token: str | None = None
    """The token that ends documents, such as '<eos>'; when not given, the one that the tokenizer's files name."""
    parse_special: bool = False
    """Encode names of special tokens in the text as these tokens, for corpora in a chat format; otherwise they are
    plain text."""
    split: str = "969,30,1"
    """Proportions of --data for training, validation and test."""
    cache_dir: Path | None = None
    """Folder that caches tokenized text and sample indices (compare Megatron's --data-cache-path); ~/.cache/mtjax when
    not given."""
    num_workers: int = at_least(0, 0, most=256)
    """Number of processes that prepare samples; 0 uses threads of the training process."""
    loader_timeout: float = seconds(300.0)
    """Seconds without a batch after which the data loader counts as stalled and the run ends with an error."""
    reset_position_ids: bool = False
    """Restart position ids at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """Mask attention across document boundaries."""
    eod_mask_loss: bool = False
    """Mask the loss of tokens whose input is the end-of-document token."""
    drop_last_partial_validation_sequence: bool = True
    """gpt: drop the last validation sample if the text ends within it; otherwise it is padded, and the padding is
    masked in the loss."""
    add_extra_token_to_sequence: bool = True
    """gpt: read one token more than sequence_length, as the label of the last token; without it, the last token has no
    label."""
    neighbours: str | None = None
    """retro: prefix of the files with neighbours of the run's samples, which mtjax data neighbours wrote."""
