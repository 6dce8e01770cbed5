"""The arrows between packages, read from the source: who may import whom, also inside functions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtjax

PACKAGE = Path(mtjax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]

BASE = {"config", "errors"}
ARROWS: dict[str, set[str]] = {
    "config": {"errors"},
    "errors": set(),
    "cli": BASE,
    "theory": BASE,
    "sharding": BASE | {"theory"},
    "models": BASE | {"theory"} | {f"sharding.{part}" for part in ("axes", "vocab", "flash", "kv_heads", "parameters")},
    "data": BASE,
    "plan": BASE | {"theory"},
    "train": BASE | {"theory", "sharding", "models", "data", "plan.formulas", "plan.hardware"},
    "inspect": BASE | {"theory", "sharding", "train", "plan"},
}
"""Package -> what it may import beside itself. Tools, which stand on these, may import all of them."""
TOOLS = {"evaluate", "finetune", "generate", "serve", "convert"}
PLACES_MODELS = {"models.placed"}
"""The one module of models that knows how parameters are spread over a mesh."""
COMPILES = {"plan.verify"}
"""Modules that hold a formula against a compiled program, and import `inspect` for it."""
SHOWS = {"train.loop"}
"""`train --inspect` shows the program before it runs."""


IN_MODELS = ("kernels", "mixers", "layer", "stack", "trunk", "families")
"""Inside models each imports those before it; the files that are not named here import none of these."""
JAX_FREE = {"models.kernels.choice"}
"""Modules, of packages that need jax, that the planner reads too."""


def module_of(path: Path) -> str:
    """`sharding.mesh`, `train`, `` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Modules of mtjax that a file imports anywhere, as `sharding.mesh`."""
    known = {module_of(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("mtjax.") for a in node.names if a.name.startswith("mtjax."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "mtjax":
                source = node.module.removeprefix("mtjax").removeprefix(".")
                for alias in node.names:
                    inner = f"{source}.{alias.name}".removeprefix(".")
                    yield inner if inner in known else source


def within(module: str, allowed: set[str]) -> bool:
    return any(module == a or module.startswith(f"{a}.") for a in allowed)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_arrows_point_one_way(path: Path) -> None:
    module = module_of(path)
    top = module.partition(".")[0]
    if top in TOOLS or not top:
        return
    assert top in ARROWS, f"say in ARROWS where {top} stands"
    allowed = ARROWS[top] | {top, ""}
    if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body):
        allowed |= {"cli"}
    if module in PLACES_MODELS:
        allowed |= {"sharding"}
    if module in COMPILES:
        allowed |= {"inspect", "train", "sharding"}
    if module in SHOWS:
        allowed |= {"inspect"}
    wrong = [name for name in imports_of(path) if not within(name, allowed)]
    assert not wrong, f"{module} imports {wrong}"


def place_in_models(module: str) -> int:
    """Where a module stands in `IN_MODELS`; -1 where it is not named there, or not of models."""
    package, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return IN_MODELS.index(part) if package == "models" and part in IN_MODELS else -1


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_import_inside_models_climbs(path: Path) -> None:
    if module_of(path).partition(".")[0] != "models":
        return
    own = place_in_models(module_of(path))
    wrong = [name for name in imports_of(path) if place_in_models(name) > own]
    assert not wrong, f"{module_of(path)} imports {wrong}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_nothing_imports_a_main_nor_a_last_tool(path: Path) -> None:
    top = module_of(path).partition(".")[0]
    for name in imports_of(path):
        assert not name.endswith("__main__"), name
        assert name.partition(".")[0] not in {"convert", "serve"} - {top}, name


def test_config_theory_and_plan_need_no_jax() -> None:
    light = [p for p in FILES if module_of(p).partition(".")[0] in {*BASE, "cli", "theory", "plan"}]
    for path in light:
        if module_of(path) in COMPILES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] in ("jax", "flax", "optax", "orbax") for n in names), path


PLACES = ("PartitionSpec", "P", "Mesh", "psum", "pmax", "pmin", "pmean", "all_gather", "psum_scatter", "all_to_all")
PLACES += ("ppermute", "axis_index", "axis_size", "pcast", "shard_map", "NamedSharding", "AbstractMesh", "ways")
AXIS_NAMES = {"data", "stage", "context", "expert", "model"}
SHAPES = {"mesh", "shape"}
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
    """Whether a file takes the names of mesh axes from `theory.rules`."""
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module in ("mtjax.theory.rules", "mtjax.theory.mesh")
        and any(a.name in ("AXES", "MANUAL", *map(str.upper, AXIS_NAMES)) for a in node.names)
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_mesh_axes_are_named_in_sharding_and_theory_alone(path: Path) -> None:
    if module_of(path).partition(".")[0] in ("sharding", "theory"):
        return
    tree = ast.parse(path.read_text())
    assert not list(axis_literals(tree)), f"{path}: a mesh axis by its name; say a logical one"
    assert not imports_axis_constants(tree), f"{path}: only sharding and theory know mesh axes; say a logical one"


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
    ],
)
def test_the_search_for_axis_names_finds_them(code: str) -> None:
    assert list(axis_literals(ast.parse(code)))


def test_the_search_for_axis_names_lets_other_words_be() -> None:
    assert not list(axis_literals(ast.parse("config['data']; spec('batch'); open('model'); config.data; shape.size")))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{path} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_public_things_are_documented_and_short(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 90, f"{path}:{node.lineno} {node.name} has {length} lines"
    for node in public_definitions(tree):
        assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a module, and methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))
