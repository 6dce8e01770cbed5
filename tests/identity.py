"""Did a refactor change a program? Losses to the bit, collectives, memory and parameter names, before and after; and
the StableHLO of steps of all families, of evaluation, initialization and decoding.

    python -m tests.identity record before.json                 # in the old checkout
    python -m tests.identity compare before.json                # in the new one: exit code 1 where anything differs
    python -m tests.identity compare before.json --only cpu t5  # cases whose name has all of these words
    python -m tests.identity compare before.json --only lower   # those that only lower, in three minutes

A record holds for one machine and one set of versions; it is not kept in the repository.
"""

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)

from mtjax.inspect.compiled import compile_step
from mtjax.inspect.report import report
from mtjax.inspect.targets import find_target
from tests.inspect.steps import tiny
from tests.tiny import LATENT, MODERNBERT, mesh_of, run_steps, tiny_config

GROUPED = {"family": "llama", "num_kv_heads": 2}
POST = {"family": "bert", "norm_placement": "post"}
SHORT = {"family": "t5", "decoder_sequence_length": 32}
EXPERTS = {"family": "llama", "num_kv_heads": 4, "mlp_size": 48, "num_experts": 4}
FIRST = EXPERTS | {"num_layers": 5, "first_dense_layers": 1}
TURNS = EXPERTS | {"num_layers": 4, "moe_every": 2}
BY_EXPERTS = "data=2,expert=2,model=2"
STAGED = "data=1,stage=2,expert=2,model=2"

RUNS: dict[str, dict[str, Any]] = {
    "gpt 2x4": {"mesh": "2x4"},
    "gpt 8x1 zero 1": {"mesh": "8x1", "zero": 1, "microbatch_size": 1},
    "gpt 2x4 split zero 3 full": {"mesh": "2x4", "sequence_parallel": True, "zero": 3, "recompute": "full"},
    "gpt 4x2 split zero 2": {"mesh": "4x2", "sequence_parallel": True, "zero": 2, "microbatch_size": 1},
    "gpt 1x8 split": {"mesh": "1x8", "sequence_parallel": True, "recompute": "selective"},
    "gpt 2x2 groups": {"mesh": "2x2", "recompute": "full", "recompute_num_layers": 2, "microbatch_size": 2},
    "gpt 2x4 float16": {"mesh": "2x4", "compute_dtype": "float16", "zero": 1},
    "llama 2x4 zero 1": {"mesh": "2x4", **GROUPED, "zero": 1},
    "llama 2x4 split zero 3": {"mesh": "2x4", **GROUPED, "sequence_parallel": True, "zero": 3, "microbatch_size": 2},
    "bert 2x4": {"mesh": "2x4", "family": "bert"},
    "bert post 2x4 split": {"mesh": "2x4", **POST, "sequence_parallel": True, "zero": 1},
    "t5 2x4": {"mesh": "2x4", "family": "t5"},
    "t5 2x4 split zero 3 full": {
        "mesh": "2x4",
        "family": "t5",
        "sequence_parallel": True,
        "zero": 3,
        "recompute": "full",
    },
    "experts behind a dense layer 2x2x2 zero 1": {"mesh": BY_EXPERTS, **FIRST, "zero": 1, "microbatch_size": 1},
    "experts behind a dense layer 2x2 split zero 3": {"mesh": "2x2", **FIRST, "sequence_parallel": True, "zero": 3},
    "experts behind a dense layer stages": {
        "mesh": STAGED,
        **(FIRST | {"first_dense_layers": 3}),
        "layers_per_stage": (2, 3),
        "zero": 1,
        "recompute": "full",
        "microbatch_size": 2,
    },
    "experts in turns 2x2x2 zero 2 full": {
        "mesh": BY_EXPERTS,
        **TURNS,
        "zero": 2,
        "recompute": "full",
        "microbatch_size": 1,
    },
    "experts in turns 2x2 zero 3": {"mesh": "2x2", **TURNS, "zero": 3, "recompute": "selective"},
    "experts in turns stages": {
        "mesh": STAGED,
        **(TURNS | {"num_layers": 6}),
        "layers_per_stage": (2, 4),
        "microbatch_size": 2,
        "zero": 3,
    },
}
"""Name -> fields over those of `tests.tiny`: three steps on CPU devices, dropout on."""

PROGRAMS: dict[str, dict[str, Any]] = {
    "gpt 2x4": {},
    "gpt 4x2 split zero 1": {"mesh": "4x2", "sequence_parallel": True, "zero": 1},
    "gpt 2x4 split zero 3": {"sequence_parallel": True, "zero": 3, "recompute": "none"},
    "gpt 2x4 zero 2 one microbatch": {"zero": 2, "microbatch_size": None},
    "llama 2x4 split": {**GROUPED, "sequence_parallel": True, "microbatch_size": 1},
    "bert post 2x4": {**POST},
    "bert 2x4 split": {"family": "bert", "sequence_parallel": True},
    "t5 2x4": {**SHORT},
    "t5 2x4 split zero 1": {**SHORT, "sequence_parallel": True, "zero": 1},
    "experts behind a dense layer zero 1": {"mesh": BY_EXPERTS, **FIRST, "zero": 1, "sequence_parallel": True},
    "experts behind a dense layer one microbatch": {"mesh": BY_EXPERTS, **FIRST, "zero": 2, "microbatch_size": None},
    "experts behind dense layers stages": {
        "mesh": STAGED,
        **(FIRST | {"first_dense_layers": 3}),
        "layers_per_stage": (2, 3),
    },
    "experts in turns zero 1": {"mesh": BY_EXPERTS, **TURNS, "zero": 1, "recompute": "full"},
    "experts in turns zero 3": {"mesh": BY_EXPERTS, **TURNS, "zero": 3, "sequence_parallel": True},
    "experts in turns one microbatch": {"mesh": BY_EXPERTS, **TURNS, "zero": 2, "microbatch_size": None},
    "experts in turns stages": {"mesh": STAGED, **TURNS, "zero": 1},
}
"""Name -> fields over those of `tests.inspect.steps`: programs for H100s and for CPUs, compiled only."""


SPLIT = {"sequence_parallel": True}
LLAMA = {"family": "llama", "num_kv_heads": 4}
EXPERTS = {
    "num_experts": 4,
    "expert_size": 20,
    "shared_expert_size": 28,
    "router_score": "sigmoid",
    "router_bias": True,
}
LORA = {"lora_rank": 2, "lora_targets": "all"}


def _hybrid(pattern: str, **fields: Any) -> dict[str, Any]:
    """A hybrid model of this pattern, whose sizes all differ."""
    sizes = {"ssm_heads": 4, "ssm_head_dim": 12, "ssm_state": 10, "ssm_groups": 2, "ssm_chunk": 5, "ssm_conv": 3}
    return {"family": "hybrid", "layer_pattern": pattern, "mlp_size": 40, "num_kv_heads": 4, **sizes, **fields}


LOWERED: dict[str, dict[str, Any]] = {
    "gpt 1x1": {},
    "gpt 2x4 zero 3": {"mesh": "2x4", **SPLIT, "zero": 3, "recompute": "full", "num_layers": 4, "microbatch_size": 1},
    "gpt 2x2 float16 zero 1": {"mesh": "2x2", "zero": 1, "compute_dtype": "float16", "num_layers": 5, "z_loss": 1e-4},
    "gpt 2x1 unrolled": {"mesh": "2x1", "unroll_layers": True, "activation": "swiglu", "zero": 2},
    "gpt 1x2 lora": {"mesh": "1x2", **SPLIT, **LORA, "lora_dropout": 0.1},
    "gpt 2x2x2 stages": {"mesh": "2x2x2", "num_layers": 4, "microbatch_size": 2, "zero": 1},
    "llama 1x8 groups": {"mesh": "1x8", **LLAMA, "num_kv_heads": 2, "qk_norm": True, "attention_bias": "qkv"},
    "llama 1x2 lora": {"mesh": "1x2", **LLAMA, **LORA, **SPLIT, "lora_dropout": 0.1},
    "llama context": {"mesh": "data=1,context=2,model=2", **LLAMA, **SPLIT, "recompute": "selective"},
    "llama unrolled": {"mesh": "2x1", **LLAMA, "unroll_layers": True, "compute_dtype": "bfloat16"},
    "llama predictions": {"mesh": "2x2", **LLAMA, "mtp_num_layers": 1, "position": "alibi"},
    "llama latent": {"mesh": "2x2", "family": "llama", "q_lora_rank": 28, **LATENT, **SPLIT},
    "llama latent lora": {"mesh": "2x2", "family": "llama", "q_lora_rank": 28, **LATENT, **SPLIT, **LORA},
    "llama experts": {"mesh": "data=2,expert=2,model=2", **LLAMA, **EXPERTS, "first_dense_layers": 1, "num_layers": 3},
    "llama experts lora": {"mesh": "1x2", **LLAMA, **LORA, "num_experts": 4},
    "llama relative": {"mesh": "1x2", **LLAMA, "activation": "geglu", "attention_sinks": True, "mlp_gate_scale": 0.5},
    "hybrid delta": {"mesh": "2x2", **_hybrid("G-G*", attention_output_gate=True), **SPLIT, "num_layers": 4},
    "hybrid delta shared groups": {"mesh": "1x4", **_hybrid("G*", ssm_groups=1, ssm_heads=8)},
    "hybrid mamba": {"mesh": "2x2", **_hybrid("M-M*"), **SPLIT, "zero": 3, "recompute": "full", "num_layers": 4},
    "hybrid mamba shared groups": {"mesh": "1x4", **_hybrid("M*", ssm_groups=1, ssm_heads=8)},
    "hybrid mamba context": {"mesh": "data=1,context=2,model=2", **_hybrid("M-", ssm_chunk=4)},
    "hybrid mamba lora": {"mesh": "1x2", **_hybrid("MH-"), **LORA, **SPLIT, "num_layers": 3, "ssm_norm": False},
    "bert": {"mesh": "2x2", "family": "bert", **SPLIT},
    "modernbert": {"mesh": "2x2", **MODERNBERT},
    "t5": {"mesh": "2x2", "family": "t5", **SPLIT},
    "retro": {"mesh": "1x2", "family": "retro", "retro_chunk": 4, "retro_first": 2, "num_layers": 3},
    "gpt fp8": {"mesh": "2x2", "fp8": "delayed", "compute_dtype": "bfloat16", "activation": "swiglu"},
}
"""Name -> fields over those of `tests.tiny`: programs that are lowered, and not compiled."""


def lower(fields: dict[str, Any]) -> dict[str, Any]:
    """Hashes the StableHLO of the step, of evaluation, initialization, and of decoding where a family generates."""
    from mtjax.config import Parallel
    from mtjax.config.families import is_decoder
    from mtjax.convert.saved_model import without_training
    from mtjax.generate.decoder import GenerationPrograms
    from mtjax.models.sharded_model import ShardedModel
    from mtjax.train.step import make_train_step

    mesh = mesh_of(fields.get("mesh", "1x1"))
    program = make_train_step(tiny_config(**{k: v for k, v in fields.items() if k != "mesh"}), mesh)
    lowered = {"step": program.lower_step(), "initialize": program.lower_initialize(0)}
    if program.config.training.fp8 == "none":
        lowered["evaluate"] = program.evaluation.lower()
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract_parameters)
    one_stage = not {"stage", "context", "expert"} & set(program.mesh_shape.axes)
    if is_decoder(program.config.model) and one_stage and not program.config.model.lora_rank:
        plain = without_training(program.config, Parallel(mesh=str(program.mesh_shape)), compute_dtype="float32")
        lowered["decode"] = GenerationPrograms.abstract(ShardedModel(plain, mesh)).lower_decode(4, 16)
    hashes = {name: program_hash(one.compiler_ir("stablehlo")) for name, one in lowered.items()}
    return {"parameters": [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in leaves], **hashes}


def program_hash(module: Any) -> str:
    """Hashes the expressions that a StableHLO module returns: functions inlined, in whatever order operations and the
    constants of loops stand, and without what nothing reads."""
    functions = {
        op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"
    }
    called: dict[tuple[str, ...], list[str]] = {}

    def digest(*parts: Any) -> str:
        return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()

    def call(name: str, arguments: list[str]) -> list[str]:
        if (name, *arguments) not in called:
            (block,) = functions[name].regions[0]
            called[name, *arguments] = run(block, {}, arguments)
        return called[name, *arguments]

    def run(block: Any, outer: dict[Any, str], arguments: list[str]) -> list[str]:
        """Returns the hashes of what a block returns."""
        values = outer | dict(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operands, name = [values[v] for v in op.operands], op.operation.name
            if op is block.operations[-1] or name.endswith(".return"):
                return operands
            if name == "func.call":
                results = call(op.attributes["callee"].value, operands)
            elif name == "stablehlo.while":
                results = loop(op, values, operands)
            else:
                bodies = [
                    run(inner, values, [digest("argument", name, i) for i in range(len(inner.arguments))])
                    for region in op.regions
                    for inner in region
                ]
                # Autodiff adds two cotangents in the order in which they come.
                operands = sorted(operands) if name == "stablehlo.add" else operands
                one = digest(name, sorted((a, str(op.attributes[a])) for a in op.attributes), operands, bodies)
                results = [digest(one, i, result.type) for i, result in enumerate(op.results)]
            values |= dict(zip(op.results, results, strict=True))
        return []

    def loop(op: Any, outer: dict[Any, str], operands: list[str]) -> list[str]:
        """Returns the hashes of a loop's results; what its body returns unchanged is a constant of it."""
        (condition,), (body,) = op.regions
        *_, last = body.operations
        fixed = [new == old for new, old in zip(last.operands, body.arguments, strict=True)]
        places = {i: len([f for f in fixed[:i] if not f]) for i in range(len(fixed))}
        inside = [operands[i] if fixed[i] else digest("carry", places[i]) for i in range(len(fixed))]
        after = [run(block, outer, inside) for block in (condition, body)]
        carried = [(operands[i], after[1][i]) for i in range(len(fixed)) if not fixed[i]]
        return [operands[i] if fixed[i] else digest("loop", places[i], after[0], carried) for i in range(len(fixed))]

    return digest(
        call("main", [digest("main", i) for i in range(len(functions["main"].regions[0].blocks[0].arguments))])
    )


def run_on_cpu(fields: dict[str, Any]) -> dict[str, Any]:
    """Three losses and gradient norms, exact, and what the parameters are called."""
    from mtjax.train.step import make_train_step

    program = make_train_step(tiny_config(**{k: v for k, v in fields.items() if k != "mesh"}), mesh_of(fields["mesh"]))
    _, metrics = run_steps(program, 3)
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract_parameters)
    return {
        "losses": [float(m["loss"]).hex() for m in metrics],
        "grad_norms": [float(m["grad_norm"]).hex() for m in metrics],
        "parameters": {jax.tree_util.keystr(p, simple=True, separator="."): list(a.shape) for p, a in leaves},
    }


def compile_for(target: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Every collective by phase, kind, axes and shapes; memory; and whether the contract holds."""
    found = report(compile_step(tiny(**fields), find_target(target)))
    sent: Counter[str] = Counter()
    for c in found.collectives:
        shapes = ", ".join(sorted(f"{a.dtype}{list(a.dims)}" for a in c.arrays))
        axes = "+".join(c.axes) if c.axes is not None else "?"
        sent[f"{c.phase}: {c.kind} over {axes} of {shapes}"] += c.count
    memory = vars(found.step.memory)
    return {"collectives": dict(sorted(sent.items())), "memory": memory, "holds": found.verdict.holds}


def cases() -> dict[str, Any]:
    """Name -> what makes the case's record."""
    found: dict[str, Any] = {f"run {name}": lambda f=fields: run_on_cpu(f) for name, fields in RUNS.items()}
    for target in ("cpu", "h100x8"):
        found |= {f"{target} {name}": lambda t=target, f=fields: compile_for(t, f) for name, fields in PROGRAMS.items()}
    return found | {f"lower {name}": lambda f=fields: lower(f) for name, fields in LOWERED.items()}


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Leaves of two nested dicts that are not equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [d for k in keys for d in differences(before.get(k), after.get(k), f"{where} / {k}" if where else k)]
    return [] if before == after else [f"{where}: {before} before, {after} now"]


def main() -> int:
    """Records or compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must have")
    options = parser.parse_args()
    chosen = {name: make for name, make in cases().items() if all(word in name.split() for word in options.only)}
    before = json.loads(options.file.read_text()) if options.file.exists() else {}
    wrong = 0
    for name, make in chosen.items():
        now = json.loads(json.dumps(make()))
        if options.what == "record":
            before[name] = now
            options.file.write_text(json.dumps(before, indent=1))
            print(f"recorded  {name}", flush=True)
            continue
        found = differences(before.get(name), now)
        wrong += bool(found)
        print(f"{'DIFFERS ' if found else 'equal   '}  {name}", *found[:20], sep="\n    ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
