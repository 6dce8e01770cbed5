"""The datasets that a config asks for: GPT, BERT and T5 samples of a split, from text or token ids, blended."""

from collections.abc import Callable

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data.cache import cache_root
from mtjax.data.corpus.encode import EncodeOptions
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.corpus.source import Source, parse_sources
from mtjax.data.prepare import load_tokenizer, prepared
from mtjax.data.samples.bert import BertDataset, BertOptions
from mtjax.data.samples.blend import BlendedDataset, normalise, samples_of_each
from mtjax.data.samples.gpt import Dataset, GPTDataset, GPTOptions
from mtjax.data.samples.split import Split, split_bounds
from mtjax.data.samples.t5 import T5Dataset, T5Options, t5_ids
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

DOCUMENTS = EncodeOptions(append_eod=True)
SENTENCES = EncodeOptions(split_sentences=True)
Bounds = tuple[int, int]
Open = Callable[[IndexedDataset, Bounds, int], Dataset]


def open_dataset(config: Config, split: Split, num_samples: int) -> Dataset:
    """The samples of one split of a run's data that its family of models reads; see `open_gpt_dataset`."""
    openers = {"bert": open_bert_dataset, "t5": open_t5_dataset}
    return openers.get(config.model.family, open_gpt_dataset)(config, split, num_samples)


def open_gpt_dataset(config: Config, split: Split, num_samples: int) -> Dataset:
    """The GPT samples of one split of a run's data, in the order that Megatron gives them.

    Args:
      config: says where the text is and what samples look like.
      split: which share.
      num_samples: how many will be needed: decides how often the text is gone through. There may be more.

    Returns:
      Samples by number: `tokens`, `labels`, `position_ids` int32[s], `loss_mask` float32[s]; with
      `reset_attention_mask` also `segment_ids` int32[s].

    Raises:
      UserError: the data can't be read, or this split has none.
    """
    tokenizer = load_tokenizer(config)
    options = GPTOptions(
        sequence_length=config.model.sequence_length,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        seed=config.training.seed,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )

    def open_gpt(tokens: IndexedDataset, bounds: Bounds, count: int) -> Dataset:
        return GPTDataset(tokens, bounds, count, options, cache_root(config))

    return _open(config, split, num_samples, tokenizer, DOCUMENTS, open_gpt)


def open_bert_dataset(config: Config, split: Split, num_samples: int) -> Dataset:
    """Like `open_gpt_dataset`, with BERT's masked sentence pairs: see `bert.BertDataset`."""
    tokenizer = load_tokenizer(config)
    options = BertOptions(config.model.sequence_length, config.training.seed)

    def open_bert(tokens: IndexedDataset, bounds: Bounds, count: int) -> Dataset:
        return BertDataset(tokens, bounds, count, tokenizer, options)

    return _open(config, split, num_samples, tokenizer, SENTENCES, open_bert)


def open_t5_dataset(config: Config, split: Split, num_samples: int, decoder_length: int | None = None) -> Dataset:
    """Like `open_gpt_dataset`, with T5's corrupted spans: see `t5.T5Dataset`."""
    tokenizer = load_tokenizer(config)
    writes = decoder_length or configs.decoder_length(config.model)
    options = T5Options(config.model.sequence_length, writes, config.training.seed)

    def open_t5(tokens: IndexedDataset, bounds: Bounds, count: int) -> Dataset:
        return T5Dataset(tokens, bounds, count, tokenizer, options)

    return _open(config, split, num_samples, tokenizer, SENTENCES, open_t5)


def vocabulary_size(config: Config, tokenizer: Tokenizer) -> int:
    """Tokens that a family's samples are made of: T5's sentinels stand after a vocabulary that has none."""
    return t5_ids(tokenizer).vocab_size if config.model.family == "t5" else tokenizer.vocab_size


def _open(
    config: Config, split: Split, num_samples: int, tokenizer: Tokenizer, encoding: EncodeOptions, make: Open
) -> Dataset:
    """One dataset, or the blend of several."""
    sources, shares = _sources_of(config, split)

    def part(source: Source, count: int) -> Dataset:
        tokens = IndexedDataset(prepared(config, source, tokenizer, encoding))
        items = tokens.num_documents if encoding.split_sentences else len(tokens)
        return make(tokens, _bounds(source, shares, split, items), max(count, 1))

    if len(sources) == 1:
        return part(sources[0], num_samples)
    given = [source.weight for source in sources if source.weight is not None]
    weights = normalise(given or [len(part(source, 1)) for source in sources])
    parts = [part(s, count) for s, count in zip(sources, samples_of_each(weights, num_samples), strict=True)]
    return BlendedDataset(parts, weights, num_samples, cache_root(config))


def _sources_of(config: Config, split: Split) -> tuple[list[Source], str | None]:
    """The sources of a split, and the shares they are cut into; None when all of each belongs to the split.

    Raises:
      UserError: both kinds of options are given, or none for this split.
    """
    data = config.data
    own = {"train": data.train_data, "valid": data.valid_data, "test": data.test_data}
    if not any(own.values()):
        return parse_sources(data.data or ""), data.split
    if data.data:
        raise UserError("give either --data, which is split, or --train-data, --valid-data and --test-data")
    if not own[split]:
        raise UserError(f"there is no --{split}-data, and the run asks for {split} samples")
    return parse_sources(own[split] or ""), None


def _bounds(source: Source, shares: str | None, split: Split, items: int) -> Bounds:
    if shares is None:
        return 0, items
    bounds = split_bounds(shares, items)[split]
    if bounds is None:
        raise UserError(f"split {shares} leaves nothing for {split}; give it a share")
    if bounds[0] == bounds[1]:
        without = ", or train without with --valid-every 0" if split == "valid" else ""
        raise UserError(
            f"split {shares} leaves none of the {items} documents of {source.name} for {split}; give it a larger "
            f"share{without}"
        )
    return bounds
