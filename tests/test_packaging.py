"""The package list, the import directions, and the size rules of the house."""

import ast
import re
import statistics
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "lorajax": ROOT / "lorajax",
    "lorajax.kernels_pallas": ROOT / "kernels_pallas",
    "lorajax.sharding": ROOT / "sharding",
}
#: What each part may import besides itself (docs/design.md, section 3).
MAY_IMPORT = {
    "lorajax": {"core", "adapters", "runtime", "kernels_pallas"},  # the list of public names
    "kernels_pallas": set(),
    "core": {"kernels_pallas"},
    "adapters": {"core"},
    "runtime": {"core", "adapters", "kernels_pallas"},
    "sharding": {"core", "kernels_pallas"},
    "models": {"core", "adapters", "sharding", "kernels_pallas"},
    "engine": {"core", "adapters", "runtime", "sharding", "models", "kernels_pallas"},
    "cli": {"core", "adapters", "runtime", "sharding", "models", "engine"},
}


def modules():
    """(dotted name, path) of every module of the distribution."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(p for p in parts if p != "__init__"))), path


MODULES = dict(modules())


def part(module):
    """The part of the table that a module belongs to."""
    pieces = module.split(".")
    if module == "lorajax":
        return module
    return pieces[1] if len(pieces) > 1 and pieces[1] in MAY_IMPORT else "core"


def imports(path, inside_functions=True):
    """(line, module) of each absolute import of the project in a file."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside_functions else tree.body
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module, [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []


def resolved(module, names):
    """Project modules that `from module import names` reaches."""
    for name in names or [""]:
        full = f"{module}.{name}".rstrip(".")
        yield full if full in MODULES else module


def test_the_package_list_is_the_folders():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join((package, *path.parent.relative_to(folder).parts))
        for package, folder in PACKAGES.items()
        for path in folder.rglob("__init__.py")
    }
    assert set(config["packages"]) == folders
    for package, folder in PACKAGES.items():
        assert config["package-dir"][package] == folder.name


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module):
    own, path = part(module), MODULES[module]
    for line, name, names in imports(path):
        assert name.split(".")[0] not in ("kernels_pallas", "sharding"), (
            f"{path}:{line}: bare import"
        )
        assert not name.startswith("jax._src"), f"{path}:{line}: JAX internals"
        if name.split(".")[0] != "lorajax":
            continue
        for reached in resolved(name, names):
            other = part(reached)
            assert other == own or other in MAY_IMPORT[own], f"{path}:{line}: {own} imports {other}"


def test_imports_have_no_cycles():
    graph = {
        module: {
            reached
            for _, name, names in imports(path)
            if name.split(".")[0] == "lorajax"
            for reached in resolved(name, names)
            if reached != module and not module.startswith(reached + ".")
        }
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    done, stack = set(), []

    def visit(module):
        if module in done or module not in graph:
            return
        assert module not in stack, " -> ".join([*stack[stack.index(module) :], module])
        stack.append(module)
        for other in sorted(graph[module]):
            visit(other)
        done.add(stack.pop())

    for module in graph:
        visit(module)


def test_the_project_is_not_imported_inside_functions():
    for path in MODULES.values():
        top = {line for line, *_ in imports(path, inside_functions=False)}
        inside = [
            line
            for line, name, _ in imports(path)
            if name.startswith("lorajax") and line not in top
        ]
        assert not inside, f"{path}: {inside}"


def test_files_and_functions_stay_small():
    sizes = {path: len(path.read_text().splitlines()) for path in MODULES.values()}
    assert max(sizes.values()) <= 500, max(sizes, key=sizes.get)
    assert statistics.median(sizes.values()) < 150
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                doc = ast.get_docstring(node, clean=False)
                lines -= len(doc.splitlines()) if doc else 0
                assert lines < 60, f"{path}:{node.lineno} {node.name}: {lines} lines"


def test_no_environment_flags():
    for path in MODULES.values():
        assert not re.search(r"os\.environ|getenv", path.read_text()), path
