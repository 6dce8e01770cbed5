"""The rows of the registry, and what is imported for them."""

import subprocess
import sys

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.config import Config, replace
from mtjax.config.families import family_of
from mtjax.convert.model_types.family import ModelType
from mtjax.data.samples.family import FamilySamples, samples_of
from mtjax.families.registry import FAMILIES, load_part
from mtjax.models.language_model import LanguageModel, TrunkWithLosses

METHODS = {name for protocol in (LanguageModel, TrunkWithLosses) for name in vars(protocol) if not name.startswith("_")}
LIGHT = """
import sys
from mtjax.analysis.anatomy import anatomy_of
from mtjax.config import Config, replace

anatomy_of(replace(Config(), family="bert", vocab_size=100).model)
others = [name for name in sys.modules if name.startswith("mtjax.families.") and name.endswith((".model", ".samples"))]
print(*others, *({"jax", "flax"} & set(sys.modules)), "mtjax.families.t5.costs" in sys.modules)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_row_are_what_their_readers_expect(family: str):
    row = FAMILIES[family]
    layers = {"layer_pattern": "M*"} if family == "hybrid" else {}
    assert anatomy_of(replace(Config(), family=family, vocab_size=100, **layers).model).weights
    assert isinstance(samples_of(family), FamilySamples)
    assert all(isinstance(model_type, ModelType) for model_type in row.hugging_face and load_part(row.hugging_face))
    for name in filter(None, (row.model, row.with_head, row.distilled, row.predicting)):
        assert {*dir(load_part(name))} >= METHODS, name
    assert bool(row.with_head) == (family in ("gpt", "llama", "bert"))
    assert bool(row.with_head) or "head" not in family_of(family).choices, "follows from the row"
    assert bool(row.predicting) == ("mtp_num_layers" in family_of(family).settings)


def test_the_parts_of_a_family_are_imported_when_they_are_used():
    """An analysis of a BERT needs neither jax, nor the networks, nor the components of a T5."""
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]
