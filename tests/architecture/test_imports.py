"""The house's floors: who may import whom, imports inside functions included; and importing has no side effects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.architecture.graph import circles, graph, longest_chain, modules

import isogemm

ROOT = Path(isogemm.__file__).parent
MODULES = modules(ROOT)
FILES = sorted(ROOT.rglob("*.py"))

# The package's folders, the lowest first. A folder imports those below it, and none beside it.
LAYERS = (
    {"base"},
    {"operands"},
    {"contract"},
    {"formats"},
    {"problem"},
    {"planner"},
    {"backends"},
    {"quant"},
    {"api"},
    {"blas", "forms", "lab", "torch"},
    {"audit", "program"},
    {"doctor", "study"},
    {"demo", "cli"},
)
# Those of a backend, and what lies beside them.
CUDA = (
    {"driver", "include"},
    {"calls", "pointers"},
    {"gemm"},
    {"quant", "ranks", "rows", "attention"},
    {"device", "plans"},
)
GROUND = {"errors", "_version"}  # of the root: anybody's
ROOF = {"isogemm", "isogemm.__main__"}  # the public names: nobody's
# The longest chain of imports, circles cut open, before the folders: 67 files.
LONGEST_BEFORE = 67


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return graph(MODULES)


def floors(layers: Sequence[set[str]]) -> dict[str, int]:
    """The floor of each folder."""
    return {name: floor for floor, names in enumerate(layers) for name in names}


def against(package: str, layers: Sequence[set[str]], free: set[str], edges: Mapping[str, set[str]]) -> list[str]:
    """Imports within `package` that point upwards or sideways."""
    floor, depth, found = floors(layers), package.count(".") + 1, []
    inside = {name: name.split(".")[depth] for name in edges if name.startswith(f"{package}.")}
    for name, own in inside.items():
        for other in edges[name]:
            part = inside.get(other)
            if part is None or part == own or part in free or own in free:
                continue
            if floor.get(part, 99) >= floor.get(own, 0):
                found.append(f"{name} imports {other}")
    return found


def test_every_folder_has_its_floor():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(floors(LAYERS))
    assert len(LAYERS) <= 13
    assert len(CUDA) <= 5


def test_the_root_has_the_public_names_and_errors_alone():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "_version.py", "errors.py"}


def test_imports_point_down(edges):
    assert not against("isogemm", LAYERS, GROUND | {"__main__"}, edges)


def test_imports_within_cuda_point_down(edges):
    assert not against("isogemm.backends.cuda", CUDA, {"__init__"}, edges)


def test_backends_know_nothing_of_each_other(edges):
    for name in edges:
        own = name.split(".")[2:3] if name.startswith("isogemm.backends.") else []
        for other in edges[name] if own else ():
            if other.startswith("isogemm.backends."):
                assert other.split(".")[2:3] == own, f"{name} imports {other}"


def test_nothing_above_the_backends_names_one(edges):
    # A program is of the CPU: its plan names that backend's kernels and blocks, and its executor chooses nothing.
    above = {name for names in LAYERS[floors(LAYERS)["backends"] + 1 :] for name in names} - {"program"}
    named = [
        f"{name} imports {other}"
        for name in edges
        if name.split(".")[1:2] and name.split(".")[1] in above
        for other in edges[name]
        if other.startswith("isogemm.backends.")
    ]
    assert not named


def test_nothing_imports_the_roof(edges):
    assert not [name for name in edges if edges[name] & ROOF and name not in ROOF]


def test_there_is_no_circle(edges):
    assert not circles({name: others - ROOF for name, others in edges.items()})


def test_the_longest_chain_is_shorter_than_it_was(capsys, edges):
    chain = longest_chain({name: others - ROOF for name, others in edges.items() if name not in ROOF})
    with capsys.disabled():
        print(f" {len(chain)} files, from {chain[0]} to {chain[-1]}")
    assert len(chain) < LONGEST_BEFORE


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
    ],
)
def test_circles_are_seen(edges, found):
    assert circles(edges) == found


def test_an_import_upwards_is_seen(tmp_path):
    package = tmp_path / "isogemm"
    for folder in ("base", "api"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "api" / "products.py").write_text("")
    (package / "base" / "low.py").write_text("def late():\n    from ..api import products\n")
    edges = graph(modules(package))
    assert edges["isogemm.base.low"] == {"isogemm.api.products"}
    assert against("isogemm", LAYERS, GROUND, edges) == ["isogemm.base.low imports isogemm.api.products"]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_prefix_stands_for_a_folder(folder):
    """Two files of one folder whose names begin alike are a group, and a group is a folder."""
    stems = sorted({p.stem for kind in ("*.py", "*.cu") for p in folder.glob(kind) if not p.stem.startswith("_")})
    first = [stem.split("_")[0] for stem in stems]
    groups = {name for name in first if first.count(name) > 1}
    assert not {stem for stem in stems if stem.split("_")[0] in groups}


def loaded_by(code: str) -> set[str]:
    """Top-level modules in memory after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"altair", "llvmlite", "matplotlib", "numba", "pandas", "psutil", "rich", "torch", "typer"}
    assert not loaded_by("import isogemm; dir(isogemm); isogemm.Contract.parse('fma/chain')") & heavy


def test_the_products_load_no_reader():
    assert not loaded_by("import isogemm; isogemm.matmul") & {"altair", "rich", "torch", "typer"}


def test_a_product_on_a_cpu_loads_nothing_that_chooses_kernels_elsewhere():
    code = "import sys, numpy, isogemm; x = numpy.ones((2, 2), 'f4'); isogemm.matmul(x, x); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "isogemm.backends.cpu.gemm.execute" in loaded
    assert not {"isogemm.planner.products", "isogemm.planner.trials", "isogemm.planner.tables"} & set(loaded)


@pytest.mark.parametrize("name", isogemm.__all__)
def test_public_names_resolve_and_are_documented(name):
    value = getattr(isogemm, name)
    assert name in dir(isogemm)
    if name != "__version__":
        assert (value.__doc__ or "").strip()


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'gemmm'"):
        isogemm.gemmm  # noqa: B018
