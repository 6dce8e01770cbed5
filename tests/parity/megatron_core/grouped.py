"""GroupedMLP, which keeps the matrices of all experts in two tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe import experts, grouped_gemm_util
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from tests.parity.megatron_core.cases import COUNTS, WITH_EXPERTS
from tests.parity.megatron_core.models import config_of
from tests.parity.megatron_core.world import world


class _Products:
    """Stands in for the package grouped_gemm, which needs CUDA."""

    @staticmethod
    def gmm(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        """Each expert's rows with its own matrix."""
        assert not trans_b
        parts = rows.split(counts.tolist())
        return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def write_grouped(path: Path) -> None:
    """Its tensors, what goes in, and what comes out."""
    util: Any = grouped_gemm_util
    util.grouped_gemm_is_available, util.assert_grouped_gemm_is_available = lambda: True, lambda: None
    util.ops = _Products
    with world(), torch.no_grad():
        torch.manual_seed(0)
        module = experts.GroupedMLP(len(COUNTS), config_of(WITH_EXPERTS["experts"]), get_default_pg_collection())
        tokens, gates = torch.randn(sum(COUNTS), module.config.hidden_size), torch.rand(sum(COUNTS))
        out = module(tokens, torch.tensor(COUNTS), gates)[0]
        np.savez(path, tokens=tokens, gates=gates, out=out, weight1=module.weight1, weight2=module.weight2)
