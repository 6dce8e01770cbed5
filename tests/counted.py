"""Counts with which tests compare programs and estimates."""

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.counts import stage_counts
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan


def rank_parameters(anatomy: Anatomy, tensor_degree: int) -> int:
    """Parameters of one tensor parallel rank, without stages (section 3 of arXiv 1909.08053)."""
    return stage_counts(anatomy, Plan(MeshShape(model=tensor_degree), 1, 1)).all
