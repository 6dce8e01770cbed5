"""Model families: a folder each, and a row here that says where its parts are."""

from dataclasses import dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class FamilyParts:
    """The parts of a family, as `module:name`. Each is imported when it is first used, so that plans and `--help` need
    no jax, and a run imports no network that it does not use."""

    config: str
    """The defaults and checks of its settings: a `config.families.Family`."""
    model: str
    """Its language model: a class with the methods of `models.language_model.LanguageModel`."""
    costs: str
    """The components that its parameters, FLOPs, memory and contract are derived from: returns the
    `analysis.anatomy.Anatomy` of a `config.Model`."""
    samples: str
    """What it reads: a `data.samples.family.FamilySamples`."""
    stacks: str = ""
    """Its stacks of layers: returns `layout.stacks.LayerStack`s of a `config.Model`; "" for those that `layout.stacks`
    derives from the settings."""
    with_head: str = ""
    """Its network with a head for finetuning, such as one for classes; "" for a family that has none."""
    distilled: str = ""
    """Its language model with the losses of a teacher's student; "" for a family that has none."""
    predicting: str = ""
    """Its language model with multi-token prediction; "" for a family that has none."""
    hugging_face: str = ""
    """The types of transformers whose weights it reads and writes, in the order in which an export prefers them: each a
    `convert.model_types.family.ModelType`. "" for a family that transformers does not have."""


_GPT = FamilyParts(
    config="mtjax.families.gpt.config:GPT",
    model="mtjax.families.gpt.model:GPT",
    costs="mtjax.families.gpt.costs:decoder",
    samples="mtjax.families.gpt.samples:SAMPLES",
    with_head="mtjax.families.gpt.finetuned:FinetunedDecoder",
    distilled="mtjax.families.gpt.distilled:DistilledGPT",
    predicting="mtjax.families.gpt.predicting:PredictingGPT",
    hugging_face="mtjax.families.gpt.hugging_face:TYPES",
)
FAMILIES: dict[str, FamilyParts] = {
    "gpt": _GPT,
    "llama": replace(_GPT, config="mtjax.families.gpt.config:LLAMA"),
    "hybrid": FamilyParts(
        config="mtjax.families.hybrid.config:HYBRID_FAMILY",
        model="mtjax.families.hybrid.model:Hybrid",
        costs="mtjax.families.hybrid.costs:hybrid",
        samples="mtjax.families.gpt.samples:SAMPLES",
        hugging_face="mtjax.families.hybrid.hugging_face:TYPES",
    ),
    "bert": FamilyParts(
        config="mtjax.families.bert.config:BERT",
        model="mtjax.families.bert.model:BERT",
        costs="mtjax.families.bert.costs:bert",
        samples="mtjax.families.bert.samples:SAMPLES",
        with_head="mtjax.families.bert.finetuned:FinetunedEncoder",
        hugging_face="mtjax.families.bert.hugging_face:TYPES",
    ),
    "t5": FamilyParts(
        config="mtjax.families.t5.config:T5",
        model="mtjax.families.t5.model:T5",
        costs="mtjax.families.t5.costs:t5",
        samples="mtjax.families.t5.samples:SAMPLES",
        hugging_face="mtjax.families.t5.hugging_face:TYPES",
    ),
    "retro": FamilyParts(
        config="mtjax.families.retro.config:RETRO_FAMILY",
        model="mtjax.families.retro.model:Retro",
        costs="mtjax.families.retro.costs:retro",
        samples="mtjax.families.gpt.samples:SAMPLES",
        stacks="mtjax.families.retro.layout:retro_stacks",
    ),
}
"""Name -> its parts. `--family` takes its choices from here."""


@cache
def load_part(name: str) -> Any:
    """Imports a part of a family, given as `module:name`."""
    return resolve_name(name)
