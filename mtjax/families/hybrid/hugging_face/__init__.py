"""Types of transformers that are hybrid models."""

from mtjax.families.hybrid.hugging_face.falcon_h1 import FALCON_H1
from mtjax.families.hybrid.hugging_face.hybrid import BAMBA, GRANITEMOEHYBRID, MAMBA2
from mtjax.families.hybrid.hugging_face.nemotron_h import NEMOTRON_H
from mtjax.families.hybrid.hugging_face.qwen3_next import QWEN3_NEXT
from mtjax.families.hybrid.hugging_face.zamba2 import ZAMBA2

TYPES = (MAMBA2, NEMOTRON_H, BAMBA, GRANITEMOEHYBRID, FALCON_H1, QWEN3_NEXT, ZAMBA2)
"""In the order in which an export prefers types that can represent a model equally well."""
