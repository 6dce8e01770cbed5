"""T5 samples: spans of text replaced by sentinels, to be written out by the decoder.

As Megatron's `T5MaskedWordPieceDataset`. Sample i draws from `seed + i`, so that any sample can be made alone.
"""

from dataclasses import dataclass

import numpy as np
from rich.text import Text

from mtjax.config import Config, sizes
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.samples.family import SENTENCES, FamilySamples, Share
from mtjax.data.samples.masking import choose_spans, geometric, whole_words, word_starts
from mtjax.data.samples.sample import Bounds, Sample
from mtjax.data.samples.sentence_runs import RunOptions, SentenceRuns
from mtjax.data.samples.styled import PLAIN, SPECIAL, styled
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

# Megatron's constants: geometric lengths with p = 0.2, at most 10 words.
LONGEST_SPAN = 10
SPAN_P = 0.2
SENTINELS = 100
# The first that a vocabulary has: Google's T5 starts its decoder with <pad>, BERT's vocabulary has [CLS] for it.
BOS_NAMES = ("[BOS]", "<s>", "<bos>", "[CLS]", "<pad>", "<|endoftext|>")
EOS_NAMES = ("[EOS]", "</s>", "<eos>", "[SEP]", "<|endoftext|>")
PAD_NAMES = ("[PAD]", "<pad>", "<|endoftext|>")


@dataclass(frozen=True)
class T5Ids:
    """Special ids of a T5 vocabulary.

    Attributes:
      bos: starts the decoder.
      eos: ends the target.
      pad: fills up.
      sentinels: replace the first, second, ... span.
      vocab_size: ids are below this, the sentinels' among them.
    """

    bos: int
    eos: int
    pad: int
    sentinels: tuple[int, ...]
    vocab_size: int


def t5_ids(tokenizer: Tokenizer) -> T5Ids:
    """Returns the special ids of a tokenizer; where it has no `<extra_id_0>`..., 100 sentinels follow its vocabulary.

    Raises:
      UserError: it has nothing that starts, ends or fills a sequence.
    """
    bos, eos, pad = (_first_special(tokenizer, names) for names in (BOS_NAMES, EOS_NAMES, PAD_NAMES))
    found = [tokenizer.special(f"<extra_id_{i}>") for i in range(SENTINELS)]
    sentinels = tuple(index for index in found if index is not None)
    size = tokenizer.vocab_size
    if not sentinels:
        # Ids after the tokenizer's: the model's vocabulary is as large as this says (`SAMPLES.vocabulary_size`).
        sentinels, size = tuple(range(size, size + SENTINELS)), size + SENTINELS
    return T5Ids(bos, eos, pad, sentinels, size)


def _first_special(tokenizer: Tokenizer, names: tuple[str, ...]) -> int:
    for name in names:
        index = tokenizer.special(name)
        if index is not None:
            return index
    raise UserError(f"the vocabulary has none of {', '.join(names)}, one of which T5 needs")


@dataclass(frozen=True)
class T5Options:
    """What a T5 sample looks like.

    Attributes:
      encoder_length: tokens of the corrupted text, padding included.
      decoder_length: tokens of the target, padding included.
      seed: of order and spans.
      mask_probability: share of tokens in spans.
      short_probability: share of samples with a random shorter target length.
    """

    encoder_length: int
    decoder_length: int
    seed: int = 1234
    mask_probability: float = 0.15
    short_probability: float = 0.1


class T5Dataset(SentenceRuns):
    """Corrupted text and its spans."""

    def __init__(
        self,
        sentences: IndexedDataset,
        bounds: Bounds,
        num_samples: int | None,
        tokenizer: Tokenizer,
        options: T5Options,
    ) -> None:
        """Cuts the documents into runs.

        Raises:
          UserError: the vocabulary lacks special tokens, or no document can be used.
        """
        self.options, self.ids = options, t5_ids(tokenizer)
        self._starts = word_starts(tokenizer)
        self._draw = geometric(LONGEST_SPAN, SPAN_P)
        # As in Megatron, which leaves room for two special tokens, although its encoder has none.
        runs = RunOptions(options.encoder_length - 2, 1, options.short_probability)
        super().__init__(sentences, bounds, num_samples, tokenizer.vocab_size, runs, options.seed)

    def __getitem__(self, index: int) -> Sample:
        """Returns one sample, with e = encoder_length and d = decoder_length.

        Returns:
          `encoder_tokens` int32[e] with sentinels, `encoder_mask` int32[e] (1 on tokens), `decoder_tokens` int32[d],
          `labels` int32[d] (the same moved one to the left, then the end), `loss_mask` float32[d].
        """
        text, _, target, random = self.run(index)
        encoder, spans = self.corrupt(text[:target], random)
        return self._padded(encoder, spans)

    def corrupt(self, text: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        """Returns `text` with sentinels for its spans, and (sentinel, span), (sentinel, span), ... - both unpadded."""
        # A T5's text has no [CLS] and [SEP] that may not be masked.
        special = np.zeros(len(text), bool)
        # The decoder also has to hold its start and a sentinel for each span: no more is masked than fits with them.
        room = (self.options.decoder_length - 1) // 2
        budget = min(max(1, round(len(text) * self.options.mask_probability)), room)
        chosen = choose_spans(whole_words(text, self._starts, special), budget, self._draw, random)
        # Further spans stay in the text, rather than share a sentinel.
        chosen = chosen[: len(self.ids.sentinels)]
        encoder, spans, at = [], [], 0
        for (a, b), sentinel in zip(chosen, self.ids.sentinels, strict=False):
            encoder += [text[at:a], [sentinel]]
            spans += [[sentinel], text[a:b]]
            at = b
        encoder.append(text[at:])
        empty = np.empty(0, np.int32)
        return np.concatenate([empty, *encoder]).astype(np.int32), np.concatenate([empty, *spans]).astype(np.int32)

    def _padded(self, encoder: np.ndarray, spans: np.ndarray) -> Sample:
        e, d = self.options.encoder_length, self.options.decoder_length
        decoder = np.concatenate([[self.ids.bos], spans]).astype(np.int32)
        labels = np.concatenate([spans, [self.ids.eos]]).astype(np.int32)
        return {
            "encoder_tokens": np.pad(encoder, (0, e - len(encoder)), constant_values=self.ids.pad),
            "encoder_mask": (np.arange(e) < len(encoder)).astype(np.int32),
            "decoder_tokens": np.pad(decoder, (0, d - len(decoder)), constant_values=self.ids.pad),
            "labels": np.pad(labels, (0, d - len(labels)), constant_values=self.ids.pad),
            # By position: `pad` may be the id of a token that also occurs in the text, such as <|endoftext|>.
            "loss_mask": (np.arange(d) < len(labels)).astype(np.float32),
        }


def open_t5(config: Config, share: Share) -> T5Dataset:
    """Opens the T5 samples that a config describes, of a share of a corpus.

    Raises:
      UserError: the vocabulary lacks special tokens, or no document can be used.
    """
    model = config.model
    options = T5Options(model.sequence_length, sizes.decoder_length(model), config.training.seed)
    return T5Dataset(share.corpus, share.bounds, share.num_samples, share.tokenizer, options)


def render(sample: Sample, tokenizer: Tokenizer) -> Text:
    """Renders the encoder's tokens, the decoder's tokens, and its labels."""
    text = Text()
    for name, mask in (("encoder_tokens", "encoder_mask"), ("decoder_tokens", "loss_mask"), ("labels", "loss_mask")):
        tokens = sample[name][: int(sample[mask].sum())]
        styles = np.where([_is_special(int(t), tokenizer) for t in tokens], SPECIAL, PLAIN)
        text.append(f"{name}: ", "bold")
        text += styled(tokens, styles, tokenizer)
        text.append("\n")
    return text


def _is_special(token: int, tokenizer: Tokenizer) -> bool:
    return token >= tokenizer.vocab_size or tokenizer.token(token)[:1] + tokenizer.token(token)[-1:] in ("[]", "<>")


SAMPLES = FamilySamples(
    SENTENCES,
    open_t5,
    render,
    legend=(("special and sentinels", SPECIAL),),
    vocabulary_size=lambda tokenizer: t5_ids(tokenizer).vocab_size,
)
