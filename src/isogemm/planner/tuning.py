"""Tuning: time what is admitted, for each product and M, and keep the fastest in a table.

For each product (without M) and each M: rough times of everything that the families offer; of the fastest, those whose
bits are right; precise times of these, interleaved. Neighbouring M that one kernel serves within `SLACK` of the fastest
share a bucket.
Nothing here can change a bit: a table only orders kernels, and each has to be admitted wherever it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ..base.progress import Tell
from ..contract.spec import Contract
from ..errors import OptionError
from ..problem.numeric import NumericKey, numeric_key
from ..problem.product import Launch, Product, Strides
from .admission import Admission, same_stamp
from .products import Chooser
from .records import notice, today
from .tables import Admitted, Bucket, DeviceLimits, LibraryRange, Table, TunedRow, Use
from .trials import config_of, product_of, variant_of

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PRECISE = 7  # kernels that are timed precisely: rough times are off by some percent
KEPT = 4  # the length of a bucket's list
SLACK = 1.005  # a kernel this close to the fastest keeps its bucket: fewer kernels
OFFERED = 64  # configurations of one family that are timed

Job = tuple[str, str, tuple[Product, ...]]
"""A family, a configuration, and products to build it for; without a configuration: a library to search."""
Offers = Mapping[tuple[str, Product], tuple[str, ...]]
Prepare = Callable[[Sequence[Job]], Offers]
"""Compiles and tries kernels ahead; returns what libraries offer, whose search takes long."""


class Wanted(NamedTuple):
    """A product to tune, without M: op(B) is [k, n]; `trans` as in BLAS, NT for a linear layer."""

    name: str
    n: int
    k: int
    trans: str = "NT"
    batch: int = 1
    ms: tuple[int, ...] = ()


class TuningBench(Protocol):
    """What tuning needs of a device besides `Machine`; `isogemm.lab.gpu.bench` has it for GPUs."""

    def seconds(self, product: Product, launches: Mapping[str, Launch], *, rough: bool) -> Mapping[str, float]:
        """Device time of each, with weights from beyond the caches; one that fails is left out."""
        ...

    def differing(self, product: Product, one: Launch, other: Launch) -> int:
        """Output elements that differ between two kernels, on operands of several kinds that show how sums are made."""
        ...

    def ceilings(self) -> DeviceLimits:
        """Measured limits of the device."""
        ...


@dataclass
class _Tuner:
    """One run of `tune`."""

    chooser: Chooser
    bench: TuningBench
    offers: Offers
    library: list[LibraryRange]

    @property
    def _device(self) -> int:
        return self.chooser.admissions.machine.device

    def at(self, product: Product, low: int) -> dict[Use, float]:
        """Microseconds of the fastest admitted kernels, each legal for rows in [low, product.m]."""
        launches: dict[Use, Launch] = {}
        for name, family in self.chooser.families.items():
            offered = self.offers.get((name, product)) or family.configs(product)
            for config in offered[:OFFERED]:
                try:
                    launches[Use(name, config)] = family.bind(product, config, self._device)
                except Exception as error:
                    notice(f"kernel {name} [{config}] cannot be built: {error}")
        rough = self._seconds(product, launches, rough=True)
        best: dict[Use, Launch] = {}
        ours = False
        for use in sorted(rough, key=rough.__getitem__):
            own = self.chooser.is_own(use)
            if len(best) >= PRECISE and (ours or not own):
                if ours:
                    break
                continue
            if self.admitted(use, product, low):
                best[use], ours = launches[use], ours or own
        precise = self._seconds(product, best, rough=False) if len(best) > 1 else {u: rough[u] for u in best}
        return self._kept({use: seconds * 1e6 for use, seconds in precise.items()})

    def _kept(self, times: dict[Use, float]) -> dict[Use, float]:
        """The fastest few, and the fastest that is ours: those of a library serve no other product than this one."""
        order = sorted(times, key=times.__getitem__)
        own = [use for use in order if self.chooser.is_own(use)]
        return {use: times[use] for use in dict.fromkeys((*order[:KEPT], *own[:1]))}

    def _seconds(self, product: Product, launches: Mapping[Use, Launch], *, rough: bool) -> dict[Use, float]:
        names = {f"{use.family} {use.config}": use for use in launches}
        times = self.bench.seconds(product, {n: launches[u] for n, u in names.items()}, rough=rough) if names else {}
        return {names[name]: seconds for name, seconds in times.items()}

    def admitted(self, use: Use, product: Product, low: int) -> bool:
        family, device = self.chooser.families[use.family], self._device
        if not family.library:
            return self.chooser.verdict(family, product, use.config).state == "admitted"
        plain = self._plain(product)
        if plain is None:
            return False
        for m in sorted({low, (low + product.m) // 2, product.m}):
            here = pose_rows(product, m)
            try:
                mine = family.bind(here, use.config, device)
            except Exception as error:
                notice(f"{use.family} [{use.config}] is no kernel for m {m} of {numeric_key(product)}: {error}")
                return False
            other = self.chooser.families[plain.family].bind(here, plain.config, device)
            if self.bench.differing(here, mine, other):
                return False
        entry = LibraryRange(
            use.family, self.chooser.admissions.fingerprint(family), numeric_key(product), variant_of(product),
            use.config, low, product.m, today(),
        )  # fmt: skip
        self.library.append(entry)
        return True

    def _plain(self, product: Product) -> Use | None:
        """An admitted kernel of ours to compare a library with."""
        for family in self.chooser.own():
            for config in family.configs(product):
                if self.chooser.verdict(family, product, config).state == "admitted":
                    return Use(family.name, config)
        return None


def tune(
    products: Sequence[Product],
    sweep: Mapping[NumericKey, Sequence[int]] | Sequence[int],
    chooser: Chooser,
    bench: TuningBench,
    *,
    name: str = "user.json",
    table: Table | None = None,
    prepare: Prepare | None = None,
    save: Callable[[Table], None] = lambda table: None,
    progress: Tell = lambda done, total, text: None,
    budget: float = float("inf"),
    again: bool = False,
) -> tuple[Table, int]:
    """Time kernels for products and rows, and write a table as it grows.

    Parameters
    ----------
    products : sequence of Product
        Of any m; see `pose`.
    sweep : sequence of int, or one for each key
        Rows to time.
    chooser, bench
        The device.
    table : Table, optional
        What to go on from. Rows of products already timed at every m by the same software are kept, or with `again`
        kept until they are timed anew.
    prepare : callable, optional
        Compiles and tries kernels ahead, in other processes.
    save : callable
        Called with the table after each product, so that an interrupted run loses one product at most.
    budget : float
        Seconds after which no further product is begun.

    Returns
    -------
    (Table, int)
        The table, and how many products the budget left out.
    """
    started, stamp = time.monotonic(), chooser.admissions.stamp
    ms = {key: sorted(sweep[key] if isinstance(sweep, Mapping) else sweep) for key in map(numeric_key, products)}
    table = _continued(table, name, stamp, chooser.arithmetic())
    timed = {row.key for row in table.rows if not again and set(ms.get(row.key, ())) <= set(row.us)}
    todo = [p for p in products if numeric_key(p) not in timed]
    offers: Offers = {}
    if todo and prepare is not None:
        progress(0, 1, "compiling")
        offers = prepare(_jobs(chooser, [pose_rows(p, m) for p in todo for m in ms[numeric_key(p)]]))
    if todo and not table.ceilings.memory_gb_per_second:
        table = replace(table, ceilings=bench.ceilings())
    total, done = sum(len(ms[numeric_key(p)]) for p in todo), 0
    for i, product in enumerate(todo):
        if time.monotonic() - started > budget:
            return table, len(todo) - i
        key, times, low = numeric_key(product), {}, 1
        tuner = _Tuner(chooser, bench, offers, [])
        for m in ms[key]:
            progress(done, total, f"{key}, m {m}")
            times[m] = tuner.at(pose_rows(product, m), low)
            low, done = m + 1, done + 1
        table = _with_row(table, merge(key, times), tuner.library, chooser)
        save(table)
    progress(total, total, "done")
    return table, 0


def readmit(
    table: Table, chooser: Chooser, bench: TuningBench, *, prepare: Prepare | None = None
) -> tuple[Table, list[str]]:
    """A table with the same rows and times, whose kernels were all admitted anew: by the present sources and software.

    The table is of this device; all else is as for `tune`. Returns the table with new fingerprints, stamp and dates,
    and what was refused.
    """
    families, verdict = chooser.families, chooser.verdict
    wanted = {(x.family, config, x.variant) for x in table.admitted for config in x.configs}
    for row in table.rows:
        for m in row.us:
            variant, uses = variant_of(pose_key(row.key, m)), row.bucket(m).uses
            own = (use for use in uses if use.family not in families or not families[use.family].library)
            wanted |= {(*use, variant) for use in own}
    todo = sorted(wanted)
    if prepare is not None:
        prepare([(name, config, (product_of(variant),)) for name, config, variant in todo if name in families])
    refused: list[str] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for name, config, variant in todo:
        here = verdict(families[name], product_of(variant), config) if name in families else Admission("absent")
        if here.state == "admitted":
            groups.setdefault((name, variant), []).append(config)
        else:
            refused.append(f"{name} [{config}] for {variant}: {here.state} {here.detail}".rstrip())
    tuner = _Tuner(chooser, bench, {}, [])
    for x in table.library:
        use, product = Use(x.family, x.config), pose_key(x.key, x.high)
        if x.family not in families or not tuner.admitted(use, product, x.low):
            refused.append(f"{x.family} [{x.config}] for {x.key}, rows {x.low} to {x.high}")
    date, fingerprint = today(), chooser.admissions.fingerprint
    admitted = (
        Admitted(name, fingerprint(families[name]), variant, tuple(configs), date)
        for (name, variant), configs in sorted(groups.items())
    )
    stamp = dict(chooser.admissions.stamp)
    made = replace(table, stamp=stamp, made=date, arithmetic=chooser.arithmetic(), admitted=tuple(admitted))
    return replace(made, library=tuple(tuner.library)), refused


def pose_key(key: NumericKey, m: int) -> Product:
    """The packed product that a row is about; of a kind that `tune` times, so without an epilogue."""
    dtype, _, rest = key.types.partition("*")
    trans = key.layout[:2].replace("S", "N")
    wanted = Wanted("", key.n, key.k, trans, key.batch)
    contract, out_dtype = Contract.parse(key.contract), rest.partition(">")[2]
    return pose(wanted, m=m, dtype=dtype, contract=contract, out_dtype=out_dtype)


def merge(key: NumericKey, times: Mapping[int, Mapping[Use, float]]) -> TunedRow:
    """A row from microseconds by m and kernel: the bucket goes on while its kernel is within `SLACK` of the fastest.

    Raises OptionError: some m has no kernel.
    """
    buckets: list[Bucket] = []
    for m in sorted(times):
        here = sorted(times[m], key=times[m].__getitem__)
        if not here:
            raise OptionError(f"kernels for {key}, m {m}", limit="one that is admitted", value="none", nearest="chain")
        last = buckets[-1].uses[0] if buckets else None
        if last is not None and last in times[m] and times[m][last] <= SLACK * times[m][here[0]]:
            here.remove(last)
            buckets[-1] = Bucket(m, (last, *here))
        else:
            buckets.append(Bucket(m, tuple(here)))
    return TunedRow(key, tuple(buckets), {m: round(min(t.values()), 3) for m, t in sorted(times.items())})


def pose(
    wanted: Wanted, *, m: int = 2, dtype: str = "bfloat16", contract: Contract, out_dtype: str | None = None
) -> Product:
    """The packed product of a layer: C[m, n] = op(A) op(B), once or in a strided batch.

    One row is contiguous however it is stored, so the layout of A shows from two rows on.
    """
    n, k, batch = wanted.n, wanted.k, wanted.batch
    trans_a, trans_b = wanted.trans[0].upper(), wanted.trans[1].upper()
    item = 1 if batch > 1 else 0
    return Product(
        m, n, k, dtype, dtype, out_dtype or dtype, contract,
        Strides(k, 1, item * m * k) if trans_a == "N" else Strides(1, m, item * m * k),
        Strides(n, 1, item * n * k) if trans_b == "N" else Strides(1, k, item * n * k),
        Strides(n, 1, item * m * n), batch,
    )  # fmt: skip


def pose_rows(product: Product, m: int) -> Product:
    """A packed product over another number of rows: strides that follow m, follow."""
    item = 1 if product.batch > 1 else 0
    a, out = product.a, product.out
    a = Strides(a.row, a.col, item * m * product.k) if a.col == 1 else Strides(1, m, item * m * product.k)
    return replace(product, m=m, a=a, out=Strides(out.row, out.col, item * m * product.n))


def _jobs(chooser: Chooser, products: Sequence[Product]) -> list[Job]:
    """Each kernel of ours with the products that it is to be built for; each product with a library to search."""
    jobs: dict[Use, list[Product]] = {}
    searches: list[Job] = []
    for product in products:
        for name, family in chooser.families.items():
            if family.library:
                searches.append((name, "", (product,)))
                continue
            for config in family.configs(product)[:OFFERED]:
                jobs.setdefault(Use(name, config), []).append(product)
    return [(*use, tuple(found)) for use, found in jobs.items()] + searches


def _continued(table: Table | None, name: str, stamp: Mapping[str, str], arithmetic: str) -> Table:
    """The table to go on with; one of other software starts anew, as its times and verdicts are void."""
    same = table is not None and all(same_stamp(table.stamp, stamp, library=x) for x in (False, True))
    if table is not None and same:
        return replace(table, name=name, stamp=dict(stamp), made=today())
    return Table(name, dict(stamp), today(), arithmetic)


def _with_row(table: Table, row: TunedRow, library: Sequence[LibraryRange], chooser: Chooser) -> Table:
    """The table with one row more, the algorithms that it uses, and everything admitted so far that some row names."""
    used = {use for bucket in row.buckets for use in bucket.uses}
    kept = [x for x in table.library if x.key != row.key] + [x for x in library if Use(x.family, x.config) in used]
    rows = (*(r for r in table.rows if r.key != row.key), row)
    admitted = tuple(_admitted(rows, table.admitted, chooser))
    return replace(table, made=today(), rows=rows, library=tuple(kept), admitted=admitted)


def _admitted(rows: Sequence[TunedRow], before: Sequence[Admitted], chooser: Chooser) -> Iterator[Admitted]:
    """What is admitted of the kernels that the rows name, by earlier runs and by this one."""
    used = {use for row in rows for bucket in row.buckets for use in bucket.uses}
    sources = {name: chooser.admissions.fingerprint(family) for name, family in chooser.families.items()}
    found = {
        (x.family, config, x.variant): x.date
        for x in before
        if sources.get(x.family) == x.fingerprint
        for config in x.configs
    }
    for known in chooser.admissions.known():
        if known.admission.state == "admitted" and sources.get(known.name) == known.fingerprint:
            found.setdefault((known.name, *config_of(known.code)), known.admission.date)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for (family, config, variant), date in sorted(found.items()):
        if Use(family, config) in used:
            groups.setdefault((family, variant, date), []).append(config)
    for (family, variant, date), configs in sorted(groups.items()):
        yield Admitted(family, sources[family], variant, tuple(configs), date)
