"""The arrows between packages, read from the source: who may import whom, also inside functions."""

import ast
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mtjax
from mtjax.layout.mesh import AXES

PACKAGE = Path(mtjax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    """The sources, parsed by the worker that asks first."""
    return {path: ast.parse(path.read_text()) for path in FILES}


BASE = {"config", "errors", "families", "storage", "waiting"}
ARROWS: dict[str, set[str]] = {
    "config": {"errors", "families", "storage", "migrate"},
    "families": set(),
    "storage": {"errors"},
    "errors": set(),
    "interrupt": set(),
    "waiting": set(),
    "migrate": {"errors"},
    "cli": BASE | {"migrate", "help"},
    "help": set(),
    "layout": BASE,
    "analysis": BASE | {"layout"},
    "sharding": BASE | {"layout"},
    "models": BASE
    | {"layout"}
    | {
        f"sharding.{part}"
        for part in (
            *("after", "axes", "context", "experts", "vocab", "distillation", "trainable"),
            *("vocab_weighted", "zero", "gradients", "rank_values", "float8", "float8_rows"),
            *("prefetch", "flash", "kv_heads", "stored_weight", "param_comm", "unstack"),
        )
    },
    "data": BASE,
    "plan": BASE | {"layout", "analysis"},
    "runtime": BASE | {"layout", "sharding", "data"},
    "train": BASE | {"layout", "analysis", "sharding", "models", "data", "runtime"},
    "inspect": BASE | {"layout", "analysis", "sharding", "models", "runtime", "train", "plan"},
}
"""Package -> what it may import beside itself. Tools, which stand on these, may import all of them."""
TOOLS = {"evaluate", "retrieval", "finetune", "generate", "serve", "convert", "launch", "compile"}
COMMANDS = "commands"
"""The only package that may import all others, and that no other imports but for `python -m mtjax.NAME`."""
PLACES_MODELS = {"models.sharded_model", "models.final_hidden_states", "models.evaluation", "models.named_parameters"}
"""Where models meet the mesh."""

IN_MODELS = (
    *(
        "kernels",
        "mixers",
        "padding_layers",
        "parallel_residual",
        "layer",
        "stack_chunks",
        "shared_block",
        "adapted_block",
        "pattern_stacks",
        "language_model",
        "logits",
        "prediction",
        "pipeline_model",
        "writer",
        "finetuned",
        "families",
        "evaluation",
        "sharded_model",
        "final_hidden_states",
        "named_parameters",
    ),
)
"""Inside models each imports those before it; the files that are not named here import none of these."""
IN_LAYOUT = (
    *("rules", "mesh", "layouts", "optimizer_states", "timetable", "attention_kernel", "stacks", "plan", "stages"),
    *("width", "float8", "hybrid", "families", "divisibility"),
)
"""And inside layout."""
IN_ANALYSIS = ("contract", "parts", "anatomy", "families")
"""Inside analysis, too; what is not named here stands above them."""
IN_TRAIN = ("folder", "observability", "first_scales", "changes", "objective", "setup", "best_checkpoint", "loop")
"""And in train; what is not named here stands below them."""


PARTS_OF_FAMILIES = {
    "config": "config",
    "costs": "analysis",
    "cost_parts": "analysis",
    "layout": "layout",
    "samples": "data",
    "sample_index": "data",
    **dict.fromkeys(
        ("hugging_face", "megatron", "megatron_arguments", "megatron_rows", "from_gpt", "to_gpt"), "convert"
    ),
}
"""File or folder of a family -> the package with whose files it stands; the others stand in models."""


def standing(module: str) -> str:
    """`models.families.gpt.model` for `families.gpt.model`: a file of a family may import what its package may."""
    top, _, inner = module.partition(".")
    family, _, part = inner.partition(".")
    if top != "families" or not part:
        return module
    return f"{PARTS_OF_FAMILIES.get(part.partition('.')[0], 'models')}.families.{family}.{part}"


def name_of(path: Path) -> str:
    """`sharding.mesh`, `train`, `` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_of(path: Path) -> str:
    """`name_of`, and for the files of a family where they stand."""
    return standing(name_of(path))


NAMES = {name_of(path) for path in FILES}
MODULES = {module_of(path) for path in FILES}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of mtjax that a file imports anywhere, as `sharding.mesh`."""
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            yield from (standing(a.name.removeprefix("mtjax.")) for a in node.names if a.name.startswith("mtjax."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "mtjax":
                source = node.module.removeprefix("mtjax").removeprefix(".")
                for alias in node.names:
                    inner = f"{source}.{alias.name}".removeprefix(".")
                    yield standing(inner if inner in NAMES else source)


def within(module: str, allowed: set[str]) -> bool:
    return any(module == a or module.startswith(f"{a}.") for a in allowed)


def may_import(path: Path) -> set[str] | None:
    """What a file may import beside the package itself; None for the tools, which may import all."""
    module = module_of(path)
    top = module.partition(".")[0]
    if top in TOOLS or top == COMMANDS or not top:
        return None
    assert top in ARROWS, f"say in ARROWS where {top} stands"
    allowed = ARROWS[top] | {top, ""}
    if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in trees()[path].body):
        allowed |= {"cli"}
    allowed |= {COMMANDS} if module.endswith("__main__") else set()
    return allowed | {"sharding"} if module in PLACES_MODELS else allowed


def test_arrows_point_one_way() -> None:
    allowed = {path: may_import(path) for path in FILES}
    wrong = [
        f"{module_of(path)} imports {name}"
        for path, names in allowed.items()
        if names is not None
        for name in imports_of(path)
        if not within(name, names)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("package", "order"), [("models", IN_MODELS), ("layout", IN_LAYOUT), ("analysis", IN_ANALYSIS), ("train", IN_TRAIN)]
)
def test_no_import_inside_a_package_climbs(package: str, order: tuple[str, ...]) -> None:
    def place(module: str) -> int:
        """Where a module stands; those not named stand below all others, in analysis above them."""
        top, _, rest = module.partition(".")
        part = rest.partition(".")[0]
        if top != package:
            return -1
        return order.index(part) if part in order else len(order) if package == "analysis" else -1

    paths = [path for path in FILES if module_of(path).startswith(f"{package}.")]
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in paths
        for name in imports_of(path)
        if place(name) > place(module_of(path))
    ]
    assert not wrong


def test_nothing_imports_a_main_nor_a_last_tool() -> None:
    """But for `convert.saved_model`, which reads weights of every format onto a mesh: other tools begin with it."""
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in FILES
        for name in imports_of(path)
        if name.endswith("__main__")
        or (within(name, {COMMANDS}) and not module_of(path).startswith(COMMANDS) and path.stem != "__main__")
        or (
            name.partition(".")[0] in {"convert", "serve"} - {module_of(path).partition(".")[0]}
            and not within(module_of(path), {COMMANDS})
            and not (name == "convert.saved_model" and module_of(path).partition(".")[0] in TOOLS)
        )
    ]
    assert not wrong


CORE = {
    "sharding": ("axes", "param_specs", "param_comm", "token_chunks", "vocab", "gradients", "zero"),
    "models": (
        *("project", "ops", "layer_context", "kernels.xla", "mixers.transformer"),
        *("layer_loop", "layer", "language_model", "families.gpt.model", "sharded_model"),
    ),
    "train": ("optimizer", "step"),
}
"""What the step of a dense decoder runs, by package; docs/architecture.md has the order in which to read it."""
LINES_OF_CORE = 4564
BELOW_CORE = {"config", "errors", "families.registry", "layout", "runtime.train_state", "runtime.xla_options"}


def imports_at_once(path: Path) -> Iterator[str]:
    """Modules of mtjax that are imported with a file: not inside functions, nor for types alone."""
    for node in trees()[path].body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mtjax":
            source = node.module.removeprefix("mtjax").removeprefix(".")
            inner = [f"{source}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (standing(module if module in NAMES else source) for module in inner)


def test_the_core_imports_what_is_optional_only_where_a_setting_asks_for_it() -> None:
    """Stages, context and expert parallelism, other mixers, kernels and families, LoRA, int8, teachers, caches."""
    core = {f"{package}.{name}" for package, names in CORE.items() for name in names}
    assert core <= MODULES
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in FILES
        if module_of(path) in core
        for name in imports_at_once(path)
        if not within(name, core | BELOW_CORE)
    ]
    assert not wrong


def test_the_core_is_short() -> None:
    """What only some settings run belongs in a file of its own, which the core imports inside a function."""
    paths = [
        path for path in FILES if module_of(path).partition(".")[2] in CORE.get(module_of(path).partition(".")[0], ())
    ]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= LINES_OF_CORE


def imported_libraries(tree: ast.AST) -> Iterator[str]:
    """First words of all that a file imports."""
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.split(".")[0] for name in names)


def test_plans_need_no_jax() -> None:
    light = [
        p
        for p in FILES
        if module_of(p).partition(".")[0] in {*BASE, "cli", "help", "migrate", "layout", "analysis", "plan"}
    ]
    heavy = {"jax", "flax", "optax", "orbax"}
    wrong = [p for p in light if heavy & set(imported_libraries(trees()[p]))]
    assert not wrong


PLACES = ("PartitionSpec", "P", "Mesh", "psum", "pmax", "pmin", "pmean", "all_gather", "psum_scatter", "all_to_all")
PLACES += ("ppermute", "axis_index", "axis_size", "pcast", "shard_map", "NamedSharding", "AbstractMesh", "ways")
AXIS_NAMES = {*AXES}
SHAPES = {"mesh", "mesh_shape", "shape"}
"""What shapes of meshes are called: `step.mesh.data` names an axis as much as a string does."""


def axis_literals(tree: ast.AST) -> Iterator[int]:
    """Lines where a mesh axis is named: in a call that places or sends, or to get at its ways in a mesh's shape."""
    for node in ast.walk(tree):
        inside: list[ast.AST] = []
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in PLACES:
                inside = [*node.args, *(k.value for k in node.keywords)]
            elif called in ("Rules",):
                inside = [k.value for k in node.keywords]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            inside = [node.slice]
        elif isinstance(node, ast.keyword) and node.arg in ("axis_name", "axis_names"):
            inside = [node.value]
        elif isinstance(node, ast.Attribute) and node.attr in AXIS_NAMES:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner in SHAPES:
                yield node.lineno
        for part in inside:
            for leaf in ast.walk(part):
                if isinstance(leaf, ast.Constant) and leaf.value in AXIS_NAMES:
                    yield leaf.lineno


def imports_axis_constants(tree: ast.AST) -> bool:
    """Whether a file takes the names of mesh axes from `layout.rules`."""
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module in ("mtjax.layout.rules", "mtjax.layout.mesh")
        and any(a.name in ("AXES", "MANUAL", *map(str.upper, AXIS_NAMES)) for a in node.names)
        for node in ast.walk(tree)
    )


def imports_partition_spec(tree: ast.AST) -> bool:
    """Whether a file imports jax's type of shardings, which `sharding.axes` offers with the functions that build it."""
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "jax.sharding"
        and any(alias.name == "PartitionSpec" for alias in node.names)
        for node in ast.walk(tree)
    )


def test_mesh_axes_are_named_in_sharding_layout_and_analysis_alone() -> None:
    """Elsewhere, say a logical axis."""
    wrong = []
    for path, tree in trees().items():
        if module_of(path).partition(".")[0] not in ("sharding", "layout", "analysis"):
            wrong += [f"{path}:{line} names a mesh axis" for line in axis_literals(tree)]
            wrong += [f"{path} imports the name of a mesh axis"] if imports_axis_constants(tree) else []
            wrong += [f"{path} imports PartitionSpec: see sharding.axes"] if imports_partition_spec(tree) else []
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "PartitionSpec('data')",
        "P(None, ('data', 'model'))",
        "lax.psum(x, 'model')",
        "jax.shard_map(f, axis_names={'data'})",
        "mesh.shape['model']",
        "f(axis_name='data')",
        "Rules(batch=('data', 'expert'))",
        "step.mesh.data",
        "shape.stage",
        "lax.psum(x, ('context',))",
        "P(('data', 'shard'))",
        "mesh_shape.shard",
    ],
)
def test_the_search_for_axis_names_finds_them(code: str) -> None:
    assert list(axis_literals(ast.parse(code)))


def test_the_search_for_axis_names_lets_other_words_be() -> None:
    assert not list(axis_literals(ast.parse("config['data']; spec('batch'); open('model'); config.data; shape.size")))


def test_files_and_functions_are_short() -> None:
    wrong = [f"{path} has {n} lines" for path in FILES if (n := len(path.read_text().splitlines())) > 400]
    for path, tree in trees().items():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = {f"{path}:{n.lineno} {n.name}": (n.end_lineno or 0) - n.lineno + 1 for n in functions}
        wrong += [f"{name} has {length} lines" for name, length in lengths.items() if length > 60]
    assert not wrong


SAID_BY_PART = {
    member.name
    for node in trees()[PACKAGE / "analysis" / "parts" / "part.py"].body
    if isinstance(node, ast.ClassDef) and node.name == "Part"
    for member in node.body
    if isinstance(member, ast.FunctionDef)
}
"""What `Part` documents, and its kinds need not say again."""


def test_public_things_are_documented() -> None:
    wrong = [f"{path} has no docstring" for path, tree in trees().items() if not ast.get_docstring(tree)]
    for path, tree in trees().items():
        bare = [node for node in public_definitions(tree) if not ast.get_docstring(node)]
        bare = [node for node in bare if node.name not in SAID_BY_PART or not within(module_of(path), {"analysis"})]
        wrong += [f"{path}:{node.lineno} {node.name} has no docstring" for node in bare]
    assert not wrong


def test_functions_of_six_lines_are_documented_where_arrays_are_computed() -> None:
    """Those of sharding and models, private and inner ones too: what a function computes is not seen from its name."""
    wrong = [
        f"{path}:{node.lineno} {node.name} has no docstring"
        for path, tree in trees().items()
        if module_of(path).partition(".")[0] in ("sharding", "models")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 5
        and not ast.get_docstring(node)
    ]
    assert not wrong


def test_comments_on_the_compiler_have_one_form() -> None:
    """`# XLA: ...` beside the statement, so that a search finds what to try again with another version."""
    wrong = []
    for path in FILES:
        if module_of(path).partition(".")[0] in ("sharding", "models", "train", "runtime"):
            with path.open("rb") as file:
                comments = {
                    t.start[0]: t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT
                }
            blocks: list[str] = []
            for line, text in comments.items():
                blocks[-1:] = [f"{blocks[-1]} {text}"] if line - 1 in comments else [*blocks[-1:], text]
            wrong += [f"{path}: {block}" for block in blocks if "XLA" in block and "XLA: " not in block]
    assert not wrong


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a module, and methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))


def test_no_class_name_stands_for_two_things() -> None:
    """`Options` aside: the options of a command, in the module of each."""
    files: dict[str, set[str]] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, set()).add(module_of(path))
    assert {name: where for name, where in files.items() if len(where) > 1 and name != "Options"} == {}
