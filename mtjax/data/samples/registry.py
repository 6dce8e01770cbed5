"""Which samples each family of models reads: a new family adds a row."""

from mtjax.data.samples import bert, gpt, t5
from mtjax.data.samples.family import FamilySamples

FAMILIES: dict[str, FamilySamples] = {
    "gpt": gpt.SAMPLES,
    "llama": gpt.SAMPLES,
    "hybrid": gpt.SAMPLES,
    "bert": bert.SAMPLES,
    "t5": t5.SAMPLES,
    "retro": gpt.SAMPLES,
}
