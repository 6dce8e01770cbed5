"""Types of transformers that are a BERT."""

from mtjax.families.bert.hugging_face.bert import BERT, ERNIE, MEGATRON_BERT
from mtjax.families.bert.hugging_face.distilbert import DISTILBERT
from mtjax.families.bert.hugging_face.modernbert import MODERNBERT
from mtjax.families.bert.hugging_face.roberta import CAMEMBERT, DATA2VEC_TEXT, ROBERTA, XLM_ROBERTA

TYPES = (
    *(BERT, MEGATRON_BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MODERNBERT),
    *(ERNIE, CAMEMBERT, DATA2VEC_TEXT),
)
"""In the order in which an export prefers types that can represent a model equally well."""
