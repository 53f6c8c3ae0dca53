"""``isogemm quantize`` and ``isogemm inspect``: registered by `isogemm.cli.commands`."""

from __future__ import annotations

import difflib
import fnmatch
import shutil
import struct
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import numpy as np
import typer

from ..base.disk import cannot_write, check_room, is_special, replacing, stoppable
from ..base.progress import progress_bar
from ..errors import FormatError, OptionError, ShapeError
from ..formats.blocks import FORMATS, BlockFormat, format_of
from ..formats.gguf_reader import package
from ..quant.files import load
from ..quant.matrix import QuantizedMatrix
from ..quant.tensor_file import TensorEntry, TensorFile
from .options import Several, print_table

_FLOATS = ("F32", "F16", "BF16")
_NO_GGUF = (".safetensors", ".json", ".bin", ".pt", ".pth", ".npz", ".npy", ".onnx")
KEEP = "keep"
_WRITTEN = ("general.architecture", "general.alignment", "general.quantization_version", "general.file_type")


def quantize_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A .safetensors or .gguf file of floats, a model's .safetensors.index.json, or folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write; one that is there is replaced.")],
    format: Annotated[str, typer.Option("--format", "-f", help="Of the 2-D weights, for example Q4_K.")],
    fallback: Annotated[
        str, typer.Option(help="The format of weights whose rows are no whole number of blocks; 'keep' for none.")
    ] = "",
    keep: Annotated[Several, typer.Option(help="Globs of tensors that stay as they are; repeat.")] = None,
) -> None:
    """Quantize a model's 2-D weights; every other tensor is copied."""
    file, fmt = load(source), _weights("--format", format)
    other = None if fallback.lower() in ("", KEEP) else _weights("--fallback", fallback)
    _check_out(file, out)
    kept = _matching(file, keep or [], "--keep")
    planned = {e.name: _planned(e, fmt, other or fallback.lower(), e.name in kept) for e in file.entries.values()}
    try:
        if is_special(out):  # which a file would take the place of; or what is open, and has the summary behind it
            raise OSError(f"{out} is no file")
        if not out.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {out.parent}")
        check_room(out)
        _write(file, planned, out)
    except OSError as error:
        name = f"{source.stem or 'model'}.gguf"
        raise cannot_write(out, f"{error}{_room(planned, out)}", name) from error
    counts = Counter(str(chosen or entry.type) for entry, chosen in planned.values())
    before, after = sum(path.stat().st_size for path in file.files), out.stat().st_size
    kinds = ", ".join(f"{n} x {kind}" for kind, n in counts.most_common()) or "no tensors"
    typer.echo(f"{out}: {kinds}; {before} -> {after} bytes")
    already = Counter(entry.type for entry in file.entries.values() if entry.quantized and entry.name not in kept)
    if n := already.total():
        words = ("weight is", "was") if n == 1 else ("weights are", "were")
        typer.echo(f"{n} {words[0]} quantized already ({', '.join(sorted(already))}) and {words[1]} copied")
    elif not any(chosen for _, chosen in planned.values()):
        typer.echo(f"nothing was quantized: no 2-D weight of {', '.join(_FLOATS)}" + " but those kept" * bool(kept))


def _weights(option: str, name: str) -> BlockFormat:
    """A format that weights can have."""
    found = format_of(name)
    if found.name == "Q8_K":
        raise OptionError(option, limit="a format of weights", value="Q8_K, which is for activations", nearest="Q8_0")
    return found


def _check_out(file: TensorFile, out: Path) -> None:
    if out.exists() and any(out.samefile(path) for path in file.files):
        raise OptionError("OUT", limit="another file than IN, which is mapped", value=str(out), nearest="another name")
    if out.suffix.lower() in _NO_GGUF:
        raise OptionError(
            "OUT", limit="the name of a .gguf file, which is what is written", value=str(out),
            nearest=str(out.with_suffix(".gguf")),
        )  # fmt: skip


def _room(planned: dict[str, tuple[TensorEntry, BlockFormat | None]], out: Path) -> str:
    """How much is to be written, and how much can be: the system says of a full disk how far it came."""
    try:
        free = shutil.disk_usage(out.parent).free
    except OSError:
        return ""
    package_ = package()
    needed = sum(_described(package_, entry, chosen)[2] for entry, chosen in planned.values())
    return f" (the tensors take {needed} bytes; {free} are free in {out.parent})"


def _write(file: TensorFile, planned: dict[str, tuple[TensorEntry, BlockFormat | None]], out: Path) -> None:
    """Write a file under another name, and give it its own when it is whole."""
    gguf = package()
    with ExitStack() as stack:
        stack.enter_context(stoppable())
        part = stack.enter_context(replacing(out, lasting=False))  # last, however the writer ends
        writer = _writer(gguf, part, str(file.metadata.get("general.architecture", "unknown")))
        stack.callback(writer.close)
        _copy_metadata(gguf, writer, file)
        for name, (entry, chosen) in planned.items():
            shape, kind, nbytes = _described(gguf, entry, chosen)
            writer.add_tensor_info(name, shape, kind[0], nbytes, raw_dtype=kind[1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with progress_bar() as tell:
            for done, (name, (entry, chosen)) in enumerate(planned.items()):
                tell(done + 1, len(planned), name)
                writer.write_tensor_data(_bytes_of(file, entry, chosen))
        writer.close()


def _writer(gguf: Any, path: Path, architecture: str) -> Any:
    """The package's writer, which refuses arrays that are empty; files have them."""

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if vtype != gguf.GGUFValueType.ARRAY or len(val) or sub_type is None:
                return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))
            return struct.pack("<I", vtype) * add_vtype + struct.pack("<IQ", sub_type, 0)

    return Writer(path, architecture)


def _matching(file: TensorFile, globs: Iterable[str], option: str) -> set[str]:
    """The names of the tensors that any of the globs matches; one that matches none is an error."""
    found: set[str] = set()
    for glob in globs:
        names = [name for name in file if fnmatch.fnmatchcase(name, glob)]
        if not names:
            near = [*difflib.get_close_matches(glob, file, 1), *file]
            nearest = quote(escape(near[0])) if near else "none: the file has no tensors"
            raise OptionError(option, limit="globs that match a tensor", value=repr(glob), nearest=nearest)
        found.update(names)
    return found


def _planned(
    entry: TensorEntry, fmt: BlockFormat, fallback: BlockFormat | str, kept: bool
) -> tuple[TensorEntry, BlockFormat | None]:
    """The format that a tensor gets; None where it is copied."""
    if len(entry.shape) != 2 or entry.type not in _FLOATS or kept:
        return entry, None
    try:
        fmt.row_bytes(entry.shape[1], entry.name)
        return entry, fmt
    except ShapeError as error:
        if fallback == KEEP:
            return entry, None
        if not isinstance(fallback, BlockFormat):
            raise ShapeError(
                error.what, limit=error.limit, value=error.value,
                nearest=f"--fallback {fmt.fitting(entry.shape[1])}, --fallback keep, or {_kept(entry)}",
            ) from error  # fmt: skip
    fallback.row_bytes(entry.shape[1], entry.name)
    return entry, fallback


def _described(gguf: Any, entry: TensorEntry, chosen: BlockFormat | None) -> tuple[Any, Any, int]:
    """Shape, (NumPy type, GGML type) and bytes, as the writer wants them."""
    kind = chosen.name if chosen else entry.type
    if kind in FORMATS:
        fmt = FORMATS[kind]
        rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
        row = fmt.row_bytes(entry.shape[-1], entry.name) if entry.shape else fmt.nbytes
        known = gguf.GGMLQuantizationType[kind]
        if not fmt.quantized:  # the type as a number; NumPy's is looked at only to tell bytes of blocks
            return entry.shape, (np.dtype(np.void), known), rows * row
        return (*entry.shape[:-1], row), (np.dtype(np.uint8), known), rows * row
    known = getattr(gguf.GGMLQuantizationType, kind, None)
    block, nbytes = gguf.GGML_QUANT_SIZES.get(known, (1, 0))
    if block > 1:  # blocks that are not ours: copied as they are
        return (*entry.shape[:-1], entry.shape[-1] // block * nbytes), (np.dtype(np.uint8), known), entry.nbytes
    plain = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}.get(kind)
    if plain is None:
        raise OptionError(
            f"{entry.name}: type", limit="a type that GGUF has", value=kind, nearest="leave the tensor out of the file"
        )
    return entry.shape, (np.dtype(plain), None), entry.nbytes


def _bytes_of(file: TensorFile, entry: TensorEntry, chosen: BlockFormat | None) -> Any:
    if chosen is None:
        return file.raw(entry.name)
    from ..quant.encode import quantize

    try:
        return quantize(file[entry.name], chosen, name=entry.name).rows
    except FormatError as error:  # the library's advice is a line of Python
        raise FormatError(error.what, limit=error.limit, value=error.value, nearest=_kept(entry)) from error


def _kept(entry: TensorEntry) -> str:
    """The option, for a shell, that leaves a tensor as it is."""
    return f"--keep {quote(escape(entry.name))}"


def _copy_metadata(gguf: Any, writer: Any, file: TensorFile) -> None:
    """What a GGUF file says of itself; a safetensors file's text is kept under its own names."""
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value, types in file.fields():
        if name.startswith("GGUF.") or name in _WRITTEN:
            continue
        if types:
            kinds = [gguf.GGUFValueType(t) for t in types]
            if kinds[1:2] == [gguf.GGUFValueType.ARRAY]:
                raise OptionError(
                    f"metadata {name}", limit="values, or arrays of them", value="an array of arrays",
                    nearest="a file without it",
                )  # fmt: skip
            writer.add_key_value(name, value, kinds[0], sub_type=kinds[1] if len(kinds) > 1 else None)
        else:
            writer.add_string(name, str(value))


def inspect_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .gguf or .safetensors file, a model's .safetensors.index.json, or folder."
        ),
    ],
    match: Annotated[Several, typer.Option(help="Globs of tensor names; repeat.")] = None,
    check: Annotated[bool, typer.Option(help="Read every scale: infinite ones and NaN are errors.")] = False,
) -> None:
    """List a file's tensors: format, shape, offset, bytes, bits of a weight, and which formats their rows can have."""
    from rich.table import Table
    from rich.text import Text

    file = load(path)
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "format", "shape", "offset", "bytes", "row bytes", "bits/weight", "super-blocks of 256"):
        table.add_column(title, justify="left" if title in ("tensor", "format", "super-blocks of 256") else "right")
    wanted = _matching(file, match or ["*"] * bool(file), "--match")
    shown = [e for e in file.entries.values() if e.name in wanted]
    several = len(file.files) > 1
    if several:
        table.add_column("file")
    unknown = Counter[str]()
    for entry in shown:
        cells = (*_row(entry), *[file.file_of(entry.name).name] * several)
        table.add_row(*map(Text, cells))  # a name is no markup
        if check and entry.type in FORMATS:
            found = file[entry.name]
            for tensor in found if isinstance(found, list) else [found]:
                if isinstance(tensor, QuantizedMatrix):
                    tensor.check()
        elif check and not entry.readable:
            unknown[entry.type] += 1
    print_table(table)
    total = sum(e.nbytes for e in shown)
    elements = sum(int(np.prod(e.shape, dtype=np.int64)) for e in shown)
    typer.echo(f"{len(shown)} tensors, {total} bytes, {8 * total / max(1, elements):.4g} bits a weight")
    if unknown:
        typer.echo(f"not checked: {', '.join(f'{n} of {kind}' for kind, n in unknown.items())}, not known here")


def _row(entry: TensorEntry) -> tuple[str, ...]:
    elements = int(np.prod(entry.shape, dtype=np.int64))
    k = entry.shape[-1] if entry.shape else 1
    rows = elements // k if k else 0
    row = str(entry.nbytes // rows) if rows else ""
    bits = f"{8 * entry.nbytes / elements:.4f}" if elements else ""
    fits = "" if len(entry.shape) < 2 else "yes" if k % 256 == 0 else f"no: k % 256 = {k % 256}; Q4_K becomes "
    if fits.startswith("no"):
        fits += FORMATS["Q4_K"].fitting(k).name
    shape = " x ".join(map(str, entry.shape))
    return entry.name, entry.type, shape, str(entry.offset), str(entry.nbytes), row, bits, fits
