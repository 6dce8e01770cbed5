"""Samples of the dummy family: the length of each document."""

from rich.text import Text

from mtjax.data.samples.family import DOCUMENTS, FamilySamples


class Lengths:
    def __init__(self, share):
        self.share = share

    def __len__(self):
        return self.share.bounds[1] - self.share.bounds[0]

    def __getitem__(self, index):
        return {"tokens": self.share.corpus.lengths[self.share.bounds[0] + index]}


SAMPLES = FamilySamples(
    DOCUMENTS,
    open=lambda config, share: Lengths(share),
    render=lambda sample, tokenizer: Text(str(sample)),
    vocabulary_size=lambda tokenizer: 7,
)
