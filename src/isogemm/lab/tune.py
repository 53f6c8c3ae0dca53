"""``isogemm tune``: which products to time on a GPU, and where the table goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..backends import accelerator, open_device
from ..base.arguments import extent
from ..base.disk import write_whole
from ..base.dtypes import NUMPY
from ..base.progress import Tell
from ..contract.spec import ContractLike, as_contract
from ..errors import DeviceError, OptionError
from ..operands.device_array import DeviceId
from ..planner.tables import Table, dump, load, user_table_path
from ..planner.tuning import SWEEP, Wanted, pose, tune
from ..problem.numeric import numeric_key
from .gpu.bench import GpuBench, prepare_in_processes
from .models import Model
from .shapes import read_shapes

FIELDS = {"name", "n", "k", "batch", "trans", "m"}


def linears(model: Model) -> list[Wanted]:
    """The linear layers of a model, as products."""
    return [Wanted(x.name, x.n, x.k) for x in model.linears()]


def attention(model: Model, tokens: int) -> list[Wanted]:
    """Scores and values of all heads of one layer, each as one strided batch over `tokens`."""
    heads, width, ms = model.heads, model.head_dim, (tokens,)
    return [Wanted("scores", tokens, width, "NT", heads, ms), Wanted("values", width, tokens, "NN", heads, ms)]


def read_wanted(path: str) -> list[Wanted]:
    """Products from a file: what `isogemm audit --shapes` reads; in JSON also ``batch``, ``trans`` and ``m``.

    ``m`` is a number of rows, or a list of such.

    Raises OptionError or ShapeError: the file cannot be read, or a field is out of range; the message names it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        content = None  # another format, or an error that the reader of shapes words
    if not (isinstance(content, list) and content and all(isinstance(row, dict) for row in content)):
        return [Wanted(x.name, x.n, x.k) for x in read_shapes(path)]
    return [_wanted(row, i, path) for i, row in enumerate(content)]


def _wanted(row: dict[str, Any], i: int, path: str) -> Wanted:
    where = f"{Path(path).name}, product {i}"
    if set(row) - FIELDS:
        raise OptionError(where, limit=", ".join(sorted(FIELDS)), value=sorted(set(row) - FIELDS), nearest="n and k")
    ms = row.get("m", [])
    ms = ms if isinstance(ms, list) else [ms]
    extents = ("n", row.get("n")), ("k", row.get("k")), ("batch", row.get("batch", 1)), *(("m", m) for m in ms)
    for name, value in extents:
        extent(f"{where}, {name}", value)
    trans = str(row.get("trans", "NT")).upper()
    if trans not in ("NN", "NT", "TN", "TT"):
        raise OptionError(f"{where}, trans", limit="NN, NT, TN or TT", value=repr(trans), nearest="NT")
    name = str(row.get("name", f"{row['n']}x{row['k']}"))
    return Wanted(name, row["n"], row["k"], trans, row.get("batch", 1), tuple(ms))


def tune_device(
    wanted: Sequence[Wanted],
    *,
    dtype: str = "bfloat16",
    contract: ContractLike | None = None,
    ms: Sequence[int] = (),
    device: int = 0,
    out: str = "",
    budget: float = float("inf"),
    progress: Tell = lambda done, total, text: None,
) -> tuple[Table, Path, int]:
    """Tune products on a GPU and write the table: the user's own, or `out`.

    An existing table of the same software is gone on with; see `isogemm.planner.tuning.tune`. Returns the table, its
    file, and how many products the budget left out. Raises DeviceError: no such GPU. Raises TableError: the table to go
    on with is damaged.
    """
    count = accelerator().count()
    if device >= count:
        limit = f"one of {count} GPUs" if count else "an NVIDIA GPU"
        value = f"device {device}" if count else "none here"
        raise DeviceError("tune", limit=limit, value=value, nearest="a machine with an NVIDIA GPU")
    opened = open_device(DeviceId("cuda", device))
    here = opened.chooser
    bits = opened.default(NUMPY[dtype], NUMPY[dtype]) if contract is None else as_contract(contract)
    path = Path(out) if out else user_table_path(here.admissions.stamp["device"])
    if path is None:
        raise OptionError("tune", limit="a home folder for the table", value="none is known", nearest="--out FILE")
    products = [pose(w, dtype=dtype, contract=bits) for w in wanted]
    sweep = {numeric_key(p): w.ms or tuple(ms) or SWEEP for p, w in zip(products, wanted, strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(table: Table) -> None:
        write_whole(path, dump(table))

    with _alone(path):
        table, left = tune(
            list({numeric_key(p): p for p in products}.values()),
            sweep,
            here,
            GpuBench(device),
            name=path.name,
            table=load(path) if path.exists() else None,
            prepare=lambda jobs: prepare_in_processes(device, jobs),
            save=save,
            progress=progress,
            budget=budget,
        )
    accelerator().reload()
    return table, path, left


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the right to go on with a table: two runs at once would each lose the other's products."""
    lock = path.with_name(f".{path.name}.lock")
    with open(lock, "a", encoding="utf-8") as file:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(
                "tune", limit="one run at a time for a table", value=f"another one writes {path.name}",
                nearest="wait, or --out FILE",
            ) from error  # fmt: skip
        yield
