"""Admission: a kernel may serve a contract only where its bits were seen to be right, on this device and software.

Kernels of our own are tried on golden products (`isogemm.planner.trials`), once for each configuration and variant.
Algorithms of a library are admitted for one exact product and a range of M, by `isogemm tune` alone. Every verdict
carries what could change it; where any of that changes, the verdict is void: ours are tried again at first use, those
of a library are left out until the next tuning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..base.disk import read_own, write_whole
from ..contract import golden
from ..contract.spec import Contract, Order
from ..problem.numeric import is_packed, numeric_key
from ..problem.product import Family, Product, Strides
from .tables import Table
from .trials import Accumulators, Machine, accumulators_by, shipped_accumulators, try_config, variant_of

__all__ = ["NATIVE", "Admissions", "Verdict", "notice", "relevant", "same_stamp", "today"]

NATIVE = "tensor_core:native"
MODELS = ("tensor_core:sm90", "tensor_core:sm80")
SCHEMA = "isogemm.admission.v1"
PROBES = 3  # kernels of a family that are asked for the device's arithmetic
# Parts of a stamp that can change bits. torch only lends memory and streams, and is no part of either.
GENERIC_PARTS = ("device", "capability", "driver", "cuda", "triton", "nvrtc", "golden")
LIBRARY_PARTS = ("device", "capability", "driver", "cublaslt")

log = logging.getLogger("isogemm")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a kernel may serve a variant of products.

    Attributes
    ----------
    state : {"admitted", "refused", "unknown", "stale"}
        ``unknown`` where nothing is on record and nothing may be run now; ``stale`` where a record is void.
    source : str
        Where the verdict comes from.
    date : str
    detail : str
        Why it was refused.
    """

    state: Literal["admitted", "refused", "unknown", "stale"]
    source: str = ""
    date: str = ""
    detail: str = ""


def notice(text: str, about: str = "") -> None:
    """Say something once in this process, to the logger ``isogemm``; of several texts `about` one thing, the first."""
    if (about or text) not in _said:
        _said.add(about or text)
        log.warning(text)


def today() -> str:
    """The date of a verdict."""
    return datetime.now(UTC).date().isoformat()


def relevant(stamp: Mapping[str, str], *, library: bool) -> dict[str, str]:
    """The parts of a stamp that can change a kernel's bits."""
    return {name: stamp[name] for name in (LIBRARY_PARTS if library else GENERIC_PARTS) if name in stamp}


def same_stamp(one: Mapping[str, str], other: Mapping[str, str], *, library: bool) -> bool:
    """Whether verdicts made under `one` hold under `other`."""
    return relevant(one, library=library) == relevant(other, library=library)


class Records:
    """Verdicts of this user, a file each: writers never meet, and a damaged file costs one trial.

    Parameters
    ----------
    folder : Path or None
        None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, key: Mapping[str, Any]) -> dict[str, str] | None:
        """What was recorded under exactly this key, if it can be read."""
        if self.folder is None:
            return None
        try:
            content = json.loads(read_own(self._path(key)) or b"")
        except ValueError:
            return None
        whole = isinstance(content, dict) and content.get("schema") == SCHEMA and content.get("key") == dict(key)
        value = content.get("value") if whole else None
        if not isinstance(value, dict) or not all(isinstance(x, str) for x in value.values()):
            return None
        return value

    def put(self, key: Mapping[str, Any], value: Mapping[str, str]) -> None:
        """Record; where nothing can be written the next process tries again."""
        if self.folder is None:
            return
        try:
            text = json.dumps({"schema": SCHEMA, "key": dict(key), "value": dict(value)})
            write_whole(self._path(key), text, lasting=False)
        except OSError as error:
            notice(f"admissions are not kept, every process tries its kernels anew: {error}")

    def _path(self, key: Mapping[str, Any]) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


class Admissions:
    """Verdicts on one device: from shipped tables, from this user's records, or from a trial now.

    Parameters
    ----------
    machine : Machine
    families : mapping of str to Family
    libraries : collection of str
        Families that golden products cannot admit.
    tables : sequence of Table
        The user's first.
    records : Records
    """

    def __init__(
        self,
        machine: Machine,
        families: Mapping[str, Family],
        libraries: Collection[str],
        tables: Sequence[Table],
        records: Records,
    ) -> None:
        self.machine, self.families, self.libraries = machine, families, libraries
        self.tables, self.records = tuple(tables), records
        self.stamp = {**machine.stamp(), "golden": golden_digest()}  # new golden bits void the verdicts of old ones
        self._known: dict[tuple[str, str, str], Verdict] = {}
        self._fingerprints: dict[str, str] = {}
        self._lock = threading.RLock()
        self._arithmetic = ""
        for table in self.tables:
            if same_stamp(table.stamp, self.stamp, library=False):
                self._read_shipped(table)

    def verdict(self, family: str, config: str, product: Product, *, trial: bool = True) -> Verdict:
        """Whether the kernel may serve `product`; ours without a record are tried now, except in a capture."""
        if family in self.libraries:
            return self._of_library(family, config, product)
        key = (family, config, variant_of(product))
        known = self._known.get(key)
        if known is not None:
            return known
        with self._lock:
            known = self._known.get(key) or self._recorded(key)
            if known is None:
                if not trial or self.machine.capturing():
                    return Verdict("unknown")
                known = self._try(key, product)
            self._known[key] = known
        return known

    def arithmetic(self) -> str:
        """What this device's tensor cores compute: a model's name, or ``tensor_core:native`` where none has its bits.

        Found once by running a plain kernel; empty where none is at hand or a capture is under way.
        """
        if not self._arithmetic:
            with self._lock:
                self._arithmetic = self._arithmetic or self._find_arithmetic()
        return self._arithmetic

    def fingerprint(self, family: str) -> str:
        """The family's source, hashed once."""
        if family not in self._fingerprints:
            self._fingerprints[family] = self.families[family].fingerprint()
        return self._fingerprints[family]

    def granted(self) -> list[tuple[str, str, str, str]]:
        """(family, configuration, variant, date) of everything admitted so far, for a table to ship."""
        return [(*key, v.date) for key, v in sorted(self._known.items()) if v.state == "admitted"]

    def accumulators(self, arithmetic: str) -> Accumulators:
        """What kernels of an arithmetic are compared with: the reference's bits, or the device's own plain kernel."""
        if arithmetic != NATIVE:
            return shipped_accumulators
        return accumulators_by(self.machine, self._plain())

    def _plain(self) -> Family:
        """The family that every other one on tensor cores is compared with, where no model fits."""
        return next(f for name, f in self.families.items() if name not in self.libraries)

    def _read_shipped(self, table: Table) -> None:
        self._arithmetic = self._arithmetic or table.arithmetic
        for entry in table.admitted:
            if entry.family in self.families and self.fingerprint(entry.family) == entry.fingerprint:
                verdict = Verdict("admitted", f"table {table.name}", entry.date)
                self._known.update({(entry.family, config, entry.variant): verdict for config in entry.configs})

    def _of_library(self, family: str, config: str, product: Product) -> Verdict:
        key, variant, stale = numeric_key(product), variant_of(product), False
        if not is_packed(product):
            return Verdict("unknown")
        for table in self.tables:
            for entry in table.library_of(key):
                same = (entry.family, entry.config, entry.variant) == (family, config, variant)
                if not same or not entry.low <= product.m <= entry.high:
                    continue
                fresh = same_stamp(table.stamp, self.stamp, library=True)
                if fresh and entry.fingerprint == self.fingerprint(family):
                    return Verdict("admitted", f"table {table.name}", entry.date)
                stale = True
        return Verdict("stale" if stale else "unknown")

    def _key(self, **parts: str) -> dict[str, Any]:
        return {**parts, "stamp": relevant(self.stamp, library=False)}

    def _recorded(self, key: tuple[str, str, str]) -> Verdict | None:
        family, config, variant = key
        found = self.records.get(
            self._key(family=family, fingerprint=self.fingerprint(family), config=config, variant=variant)
        )
        if found is None or found.get("state") not in ("admitted", "refused"):
            return None
        if found["state"] == "refused":
            return Verdict("refused", "this user's records", found.get("date", ""), found.get("detail", ""))
        return Verdict("admitted", "this user's records", found.get("date", ""))

    def _try(self, key: tuple[str, str, str], product: Product) -> Verdict:
        family, config, variant = key
        try:
            why = try_config(
                self.machine,
                self.families[family],
                config,
                product,
                self.accumulators(product.contract.arithmetic),
            )
        except Exception as error:
            # Not a wrong bit, and perhaps not this kernel's fault (a device out of memory, one broken by another
            # kernel): it does not serve in this process, and nothing is recorded.
            notice(f"kernel {family} [{config}] cannot run for {variant}: {type(error).__name__}: {error}")
            return Verdict("refused", "a trial in this process", today(), f"{type(error).__name__}: {error}")
        state: Literal["admitted", "refused"] = "refused" if why else "admitted"
        if why:
            notice(f"kernel {family} [{config}] is not used for {variant}: {why}")
        verdict = Verdict(state, "a trial in this process", today(), why)
        value = asdict(verdict)
        self.records.put(
            self._key(family=family, fingerprint=self.fingerprint(family), config=config, variant=variant),
            {name: value[name] for name in ("state", "date", "detail")},
        )
        return verdict

    def _find_arithmetic(self) -> str:
        """A model that some plain kernel has the bits of. One broken kernel must not make a device a stranger."""
        probe = _probe(Contract(MODELS[0]))
        plain = [
            (name, config)
            for name, family in self.families.items()
            if name not in self.libraries
            for config in [c for c in family.configs(probe) if family.supports(probe, c)][:PROBES]
        ]
        if not plain:
            return ""
        sources = {name: self.fingerprint(name) for name, _ in plain}
        key = self._key(arithmetic="tensor_core", sources=json.dumps(sources, sort_keys=True))
        found = self.records.get(key)
        if found is not None and found.get("value") in (*MODELS, NATIVE):
            return found["value"]
        if self.machine.capturing():
            return ""
        value = next(filter(None, (self._model_of(*use, probe) for use in plain)), NATIVE)
        if value == NATIVE:
            notice(
                f"the tensor cores of {self.stamp.get('device', 'this device')} have the bits of no known model: "
                f"products of bfloat16 and float16 are {NATIVE} there, which has no executable definition; kernels "
                "are compared with one plain kernel"
            )
        self.records.put(key, {"value": value})
        return value

    def _model_of(self, family: str, config: str, probe: Product) -> str:
        """The model whose bits a kernel has; the kernel asks the device's own tensor cores, whatever `probe` says."""
        for model in MODELS:

            def bits(
                arithmetic: str, dtype_a: str, dtype_b: str, case: golden.Case, model: str = model
            ) -> golden.Array | None:
                return golden.expected(model, dtype_a, dtype_b, case)

            try:
                if not try_config(self.machine, self.families[family], config, probe, bits):
                    return model
            except Exception as error:
                notice(f"kernel {family} [{config}] cannot run: {type(error).__name__}: {error}")
                break
        return ""


def _probe(contract: Contract) -> Product:
    """The product that tells arithmetics apart: bfloat16, float32 out, one weight row to a column."""
    return Product(
        16, 64, 2568, "bfloat16", "bfloat16", "float32", Contract(contract.arithmetic, Order()),
        Strides(2568, 1), Strides(1, 2568), Strides(64, 1),
    )  # fmt: skip


@cache
def golden_digest() -> str:
    """Hash of the shipped bits."""
    return hashlib.sha256(golden.data_path().read_bytes()).hexdigest()[:16]
