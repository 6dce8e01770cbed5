"""How many threads an SM of a GPU serves per clock, by kind of machine instruction.

Source: CUDA C++ Programming Guide 13, "Arithmetic Instructions", table "Throughput of Native Arithmetic Instructions"
(results per clock cycle per multiprocessor; an instruction on pairs of 16-bit numbers has two results per thread),
columns of compute capability 8.0 and 9.0, written down without the table at hand; 10.0 counts as 9.0. Load and store
units, and the width of the caches: the white papers of
A100 and H100 (32 units, 128 bytes per clock of L1 and 64 of L2). All of them issue an instruction of 4 warps per clock.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mtjax.errors import UserError

ALU, FMA, MULTIPLY, HALF, DOUBLE = "ALU", "FMA", "integer multiply", "half", "double"
SPECIAL, CONVERT, PACK, MEMORY, SHUFFLE = "special", "convert", "pack", "memory", "shuffle"
ISSUE, SECTORS = "issue", "sectors"
ISSUED = 128
"""Threads whose instruction an SM issues in a clock."""
L1_SECTORS, L2_SECTORS = 4, 2
"""Sectors of 32 bytes that an SM exchanges in a clock with its L1 cache, and with the L2 cache."""

_COMMON = {ALU: 64, MULTIPLY: 64, SPECIAL: 16, PACK: 64, MEMORY: 32, SHUFFLE: 32}
RATES: Mapping[tuple[int, int], Mapping[str, int]] = MappingProxyType(
    {
        (8, 0): {**_COMMON, FMA: 64, HALF: 128, DOUBLE: 32, CONVERT: 16},
        (9, 0): {**_COMMON, FMA: 128, HALF: 128, DOUBLE: 64, CONVERT: 64},
        (10, 0): {**_COMMON, FMA: 128, HALF: 128, DOUBLE: 64, CONVERT: 64},
    }
)
"""Compute capability -> pipe -> threads per clock and SM."""


def _kinds(pipe: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), pipe)


PIPE_OF: Mapping[str, str] = MappingProxyType(
    {
        **_kinds(
            ALU, "LOP3 LOP SHF SHL SHR IADD3 IADD VIADD ISETP SEL PRMT VIMNMX VIMNMX3 IMNMX LEA FSETP FMNMX FMNMX3"
        ),
        **_kinds(ALU, "FSEL FSET PLOP3 HSETP2 HMNMX2 HSET2 IABS SGXT BMSK VIADDMNMX VOTE P2R R2P IADD2 MOV VABSDIFF"),
        **_kinds(FMA, "FADD FMUL FFMA FADD2 FMUL2 FFMA2"),
        **_kinds(MULTIPLY, "IMAD IDP IMUL"),
        **_kinds(HALF, "HADD2 HMUL2 HFMA2"),
        **_kinds(DOUBLE, "DADD DMUL DFMA DSETP DMNMX"),
        **_kinds(SPECIAL, "MUFU FLO POPC BREV REDUX CREDUX"),
        **_kinds(CONVERT, "F2F I2F F2I FRND I2I"),
        **_kinds(PACK, "F2FP I2FP F2IP I2IP"),
        **_kinds(MEMORY, "LDG STG ATOMG RED REDG LDS STS LDL STL ATOM ATOMS LD ST LDSM STSM LDGSTS LDGMC REDAS"),
        **_kinds(SHUFFLE, "SHFL MATCH"),
    }
)
"""Machine instruction, without its modifiers -> pipe. Others only count as issued: branches, uniform registers, tensor
cores, whose time is that of the matmul's FLOPs."""


def rates_of(capability: tuple[int, int]) -> Mapping[str, int]:
    """Returns the rates of a compute capability.

    Raises:
      UserError: none are known for it.
    """
    if capability not in RATES:
        known = ", ".join(f"{major}.{minor}" for major, minor in RATES)
        raise UserError(
            f"--kernels knows the instruction rates of compute capability {known}, and the target's is "
            f"{capability[0]}.{capability[1]}: choose a target such as h100x8"
        )
    return RATES[capability]
