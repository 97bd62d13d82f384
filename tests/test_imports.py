"""Imports run one way, and the command line starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerocheck
from zerocheck.catalogue import NAMED

PACKAGE = Path(zerocheck.__file__).parent
REFERENCE = Path(__file__).parent.parent / "reference" / "zerocheck_reference"

# What each part may import of the others. It has no cycle, which a test below holds.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "foreign_text": set(),
    "version": set(),
    "catalogue": {"errors", "version"},
    "causes": {"errors"},
    "compat": {"errors"},
    "compat_compiler": set(),
    "compat_device": {"errors"},
    "compat_memory": {"errors"},
    "floating_point": {"zerocheck_reference"},
    "machine": {"errors"},
    "sizes": {"errors"},
    "case": {"catalogue", "machine", "errors"},
    "execution": {"compat", "compat_compiler", "floating_point", "zerocheck_reference"},
    "session_objects": {"errors"},
    "user_code": {"catalogue", "session_objects", "errors"},
    "models": {"case", "user_code", "catalogue", "compat", "machine", "errors"},
    "optimizers": {
        "case", "execution", "user_code", "session_objects", "catalogue", "causes",
        "floating_point", "machine", "errors", "zerocheck_reference",
    },
    "protocol": {"case"},
    "ranks": {"execution", "machine", "errors"},
    "contract": {
        "models", "optimizers", "protocol", "case", "user_code", "catalogue", "compat", "machine",
        "errors",
    },
    "adapters": {
        "contract", "models", "optimizers", "protocol", "case", "compat", "compat_memory",
        "machine", "errors", "foreign_text", "version",
    },
    "checkpoint": {"catalogue", "contract", "errors", "foreign_text"},
    "drive": {
        "contract", "models", "optimizers", "protocol", "case", "execution", "user_code",
        "session_objects", "catalogue", "compat", "compat_memory", "machine", "errors",
    },
    "judge": {
        "contract", "models", "optimizers", "protocol", "case", "execution", "causes", "compat",
        "compat_compiler", "floating_point", "machine", "errors", "zerocheck_reference",
    },
    "faults": {
        "adapters", "contract", "models", "optimizers", "case", "catalogue", "causes", "compat",
        "errors",
    },
    "job_metrics": {
        "drive", "protocol", "compat", "compat_memory", "sizes", "errors",
        "foreign_text", "version",
    },
    "memory": {
        "adapters", "contract", "models", "optimizers", "protocol", "case", "user_code",
        "catalogue", "compat", "compat_device", "compat_memory", "machine", "sizes", "errors",
    },
    "run": {
        "drive", "judge", "contract", "models", "protocol", "ranks", "case",
        "user_code", "session_objects", "catalogue", "causes", "machine", "errors",
        "foreign_text", "version",
    },
    "attached": {
        "job_metrics", "run", "checkpoint", "drive", "judge", "catalogue", "contract", "optimizers",
        "protocol", "ranks", "case", "user_code", "causes", "compat", "compat_compiler",
        "floating_point", "machine", "sizes", "errors", "foreign_text", "zerocheck_reference",
    },
    "kill_matrix": {
        "faults", "run", "judge", "contract", "models", "protocol", "case", "catalogue", "causes",
        "machine", "errors",
    },
    "report": {"run", "protocol", "case", "catalogue", "errors", "foreign_text"},
    "script": {
        "run", "adapters", "contract", "optimizers", "protocol", "case", "catalogue", "errors",
    },
    "strategies": {"run", "protocol", "case", "user_code", "catalogue", "errors"},
    "cli": {
        "attached", "kill_matrix", "report", "script", "faults", "memory", "run", "checkpoint",
        "protocol", "case", "user_code", "session_objects", "catalogue", "machine", "sizes",
        "errors", "foreign_text", "version",
    },
    "integrations": {"attached", "contract", "errors"},
    "testing": {
        "report", "strategies", "run", "protocol", "case", "user_code", "catalogue", "errors",
        "foreign_text",
    },
    "__init__": {
        "testing", "attached", "cli", "job_metrics", "contract", "errors", "version",
    },
    "__main__": {"cli", "errors"},
    "pytest_plugin": {"testing", "report", "run", "errors", "foreign_text"},
}  # fmt: skip


def part_of(path: Path) -> str:
    """The part that a file belongs to: a folder or a single file of the package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in a file, those within functions too."""
    package = ["zerocheck", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def parts_of(module: str) -> str | None:
    """Which part an import names, or None for what is not ours."""
    first, *rest = module.split(".")
    if first == "zerocheck_reference":
        return first
    if first != "zerocheck":
        return None
    return rest[0] if rest and rest[0] in ALLOWED else "zerocheck"


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
    wrong = [
        f"line {line}: {part} imports {module}"
        for line, module in imported(path)
        if (other := parts_of(module)) is not None and other != part
        if other not in ALLOWED[part]
    ]
    assert not wrong


def test_what_is_allowed_has_no_cycle() -> None:
    done: set[str] = set()

    def visit(part: str, above: tuple[str, ...]) -> None:
        assert part not in above, " -> ".join((*above, part))
        if part not in done:
            for other in ALLOWED.get(part, ()):
                visit(other, (*above, part))
            done.add(part)

    for part in ALLOWED:
        visit(part, ())


def test_the_house_has_ten_floors_at_most() -> None:
    """A part stands above all that it imports. More floors than that nobody sees in one look."""

    def floor_of(part: str) -> int:
        return 1 + max((floor_of(other) for other in ALLOWED.get(part, ())), default=0)

    assert max(map(floor_of, ALLOWED)) <= 10


RUN = ("records", "known_issues", "plan", "execute", "findings")
"""Packages of `run`: each imports those before it only, and the engine all of them."""
DATA_OF_A_RUN = ("records", "known_issues")
"""What the reports may read of a run."""


def package_of_run(module: str) -> str | None:
    """The package of `run` that a module is in; "" for a file of `run` itself, None elsewhere."""
    first, *rest = module.removeprefix("zerocheck.").split(".")
    if first != "run" or not rest:
        return None
    return rest[0] if rest[0] in RUN else ""


def order(module: str) -> int:
    """Place of a module of `run` in the order of imports."""
    package = package_of_run(module)
    return RUN.index(package) if package else len(RUN)


@pytest.mark.parametrize("path", sorted((PACKAGE / "run").rglob("*.py")), ids=str)
def test_packages_of_run_import_one_way(path: Path) -> None:
    mine = ".".join(["zerocheck", *path.relative_to(PACKAGE).with_suffix("").parts])
    for line, module in imported(path):
        if package_of_run(module) is not None:
            assert order(module) <= order(mine), f"line {line} imports {module}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "report").rglob("*.py")), ids=str)
def test_reports_read_the_data_of_a_run_alone(path: Path) -> None:
    packages = {package_of_run(module) for _, module in imported(path)}
    assert packages <= {None, *DATA_OF_A_RUN}


PEERS = ("drive", "ranks", "judge")
"""Rooms that know one another by the data of `protocol` alone."""


@pytest.mark.parametrize("peer", PEERS)
def test_peers_never_import_one_another(peer: str) -> None:
    assert not ALLOWED[peer] & {*PEERS, "faults", "run", "report"}


def test_reports_and_faults_import_no_judge() -> None:
    assert "judge" not in ALLOWED["report"] | ALLOWED["faults"] | ALLOWED["cli"]


REGISTRY = "catalogue.py"
KNOW_LIBRARIES = ("adapters", "faults", "integrations")
"""Rooms whose files are each of a library, or of a fault of one."""

ADAPTERS = {path.name for path in (PACKAGE / "adapters").iterdir() if path.is_dir()} - {"shared"}
LIBRARIES = ("deepspeed",)


def adapters_named(path: Path) -> Iterator[str]:
    """Names of adapters, built-in implementations and their libraries in code, not in prose."""
    for line, module in imported(path):
        top, *rest = module.split(".")
        if top in LIBRARIES or (module.startswith("zerocheck.adapters.") and rest[1] in ADAPTERS):
            yield f"line {line}: imports {module}"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = (*NAMED, *ADAPTERS, *LIBRARIES)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in prose:
            continue
        text = str(node.value)
        if text in words or text.startswith(tuple(f"{word}." for word in words)):
            yield f"line {node.lineno}: names {text!r}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_registry_names_an_adapter(path: Path) -> None:
    """What differs between implementations is asked of the adapter."""
    if part_of(path) in KNOW_LIBRARIES:
        return
    found = list(adapters_named(path))
    assert bool(found) == (str(path.relative_to(PACKAGE)) == REGISTRY), found


def test_packages_of_adapters_import_nothing() -> None:
    """Their parts without torch can be imported without torch."""
    for path in (PACKAGE / "adapters").rglob("__init__.py"):
        if "user_config" not in path.parts:  # of plain data
            assert not list(imported(path)), path


@pytest.mark.parametrize("path", sorted(REFERENCE.rglob("*.py")), ids=lambda path: path.name)
def test_the_reference_imports_torch_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top == "torch" or top in sys.stdlib_module_names, name
            assert not name.startswith("torch.optim"), name


@pytest.mark.parametrize(
    "code",
    [
        "import zerocheck.cli",
        "import zerocheck.pytest_plugin",
        "import zerocheck.testing.checks",
        "import zerocheck.strategies; zerocheck.strategies.cases('fsdp2')",
        "import zerocheck.run.plan.options",
        "from zerocheck.adapters.deepspeed import idle_ranks, options, user_config",
        "import zerocheck.report.write",
        "from zerocheck import UsageError, parametrize_with_checks, run",
        "from zerocheck.cli import main\ntry: main(['list'])\nexcept SystemExit: pass",
        "from zerocheck.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass",
        "from zerocheck.cli import main\ntry: main(['faults', '--list'])\nexcept SystemExit: pass",
        "from zerocheck.cli import main\ntry: main(['checkpoint', '-h'])\nexcept SystemExit: pass",
        "from zerocheck.cli import main\ntry: main(['memory', '-h'])\nexcept SystemExit: pass",
    ],
)
def test_starts_without_torch(code: str) -> None:
    check = "\nimport sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code + check], check=True, env=environment)


@pytest.mark.parametrize(
    "code",
    [
        "import zerocheck",
        "import zerocheck.run",
        "import zerocheck.run.plan.options",
        "from zerocheck.run import engine",
        "import zerocheck.cli",
        "import zerocheck.testing.checks",
    ],
)
def test_the_name_of_the_package_run_is_the_function(code: str) -> None:
    """Whatever was imported before; and modules of the package are imported all the same."""
    check = """
import zerocheck
assert zerocheck.run.__module__ == "zerocheck.cli.python_run"
import zerocheck.run.plan.run_shard
from zerocheck.run import plan
from zerocheck.run.plan import profiles
from zerocheck import run
assert run is zerocheck.run and run.__name__ == "run" and plan.profiles is profiles
"""
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code + check], check=True, env=environment)


def test_every_public_name_is_there() -> None:
    for name in zerocheck.__all__:
        assert getattr(zerocheck, name).__name__ == name
    assert set(zerocheck.__all__) <= set(dir(zerocheck))
    with pytest.raises(AttributeError, match="has no attribute 'Implementations'"):
        _ = zerocheck.Implementations  # type: ignore[attr-defined]
