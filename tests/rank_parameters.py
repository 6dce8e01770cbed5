"""The parameters of a tensor parallel rank, to which tests compare what ranks hold, send and compute."""

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.counts import stage_counts
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan


def rank_parameters(anatomy: Anatomy, tensor_degree: int) -> int:
    """Returns the parameters of one tensor parallel rank, without stages (section 3 of arXiv 1909.08053)."""
    return stage_counts(anatomy, Plan(MeshShape(model=tensor_degree), 1, 1)).all
