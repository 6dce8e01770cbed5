"""The tasks by name."""

from collections.abc import Mapping

from mtjax.evaluate.tasks.lambada import LAMBADA
from mtjax.evaluate.tasks.perplexity import PERPLEXITY
from mtjax.evaluate.tasks.task import Kind
from mtjax.evaluate.tasks.wikitext103 import WIKITEXT103

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (WIKITEXT103, LAMBADA, PERPLEXITY)}
