"""Export of a snapshot's weights for other programs: safetensors, npz, or torch files.

Tensors are read and verified slice by slice, and written immediately, so memory does not grow with the model.
Exceptions: a torch file is assembled in memory, and tensors stored as bytes, such as a model's buffers, are held
whole. Files appear under their names when all are complete, or not at all.

The optimizer's state is in ``load``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.errors import ConfigurationError, StorageError, UnknownParametersError
from psdist.snapshots.format import Manifest, ParametersState
from psdist.snapshots.model_tensors import DTYPES as TENSOR_DTYPES
from psdist.snapshots.model_tensors import StoredTensor, contents
from psdist.snapshots.reader import SliceReader
from psdist.snapshots.storage import Storage
from psdist.types import ITEM_BYTES

FORMATS: Final = ("safetensors", "npz", "torch")
DTYPES: Final = tuple(ITEM_BYTES)
#: Formats without bfloat16: numpy's, for example.
_WITHOUT_BFLOAT16: Final = ("npz",)
#: These formats store tensors of the following dtypes as float32.
_UNKNOWN_TO_NUMPY: Final = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
FILE_BYTES_MAX: Final = 5_000_000_000
_SAFETENSORS_DTYPES: Final = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "complex64": "C64"},
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export.

    dtype: dtype for all floating-point tensors; None for each tensor's own.
    parameters: names of parameter sets; empty for all.
    file_bytes_max: bytes of tensors per file. A tensor is never split.
    overwrite: True to replace existing files.
    Raises ConfigurationError.
    """

    format: str = "safetensors"
    dtype: str | None = None
    parameters: tuple[str, ...] = ()
    file_bytes_max: int = FILE_BYTES_MAX
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigurationError(f"{self.format!r:.80} is not a format: use one of {', '.join(FORMATS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigurationError(f"{self.dtype!r:.80} is not a dtype: use one of {', '.join(DTYPES)}")
        if self.dtype == "bfloat16" and self.format in _WITHOUT_BFLOAT16:
            raise ConfigurationError(f"{self.format} has no bfloat16: use --dtype float32, or --format safetensors")


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    files: in order, the index last.
    overflowed: number of finite elements that became infinite in the dtype.
    left_out: a sentence for each kind of tensor in the snapshot that cannot be exported.
    """

    files: tuple[Path, ...]
    tensors: int
    bytes: int
    overflowed: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    """Tensor and its dtype in the file."""

    tensor: StoredTensor
    dtype: str

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * TENSOR_DTYPES[self.dtype].itemsize


async def export(
    storage: Storage,
    manifest: Manifest,
    out: Path,
    options: ExportOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write a snapshot's weights, and a model's buffers, to ``out``.

    If they exceed one file, several files and an index are written.

    progress: called with the bytes written so far, and the total.
    Raises ConfigurationError if a file exists or two tensors have the same name, UnknownParametersError, StorageError
    if a file cannot be written, SnapshotCorruptError if the snapshot is damaged. No file of this export remains then.
    """
    _check_chosen(manifest, options)
    found = await contents(storage, manifest, options.parameters)
    items = _items(found.tensors, options)
    parts = _parts(items, options.file_bytes_max)
    paths = _paths(out, len(parts))
    index = out.with_name(f"{out.name}.index.json") if len(parts) > 1 else None
    _check_free([*paths, *([index] if index else [])], options.overwrite)
    total = sum(item.bytes for item in items)
    source = _Source(storage, manifest)
    written = overflowed = 0
    with _together(out) as open_draft:
        for path, part in zip(paths, parts, strict=True):
            with open_draft(path) as raw, _FILES[options.format](raw, part) as start_tensor:
                for item in part:
                    with start_tensor(item) as write:
                        async for values in source.chunks(item):
                            chunk, lost = _cast(values, item.dtype)
                            overflowed += lost
                            written += chunk.nbytes
                            write(chunk.view(np.uint8).data)
                            progress(written, total)
        if index is not None:
            with open_draft(index) as raw:
                raw.write(_index(paths, parts, total))
    return Exported((*paths, *([index] if index else [])), len(items), total, overflowed, found.left_out)


# --- what is written where --------------------------------------------------------------------------------------------


def _check_chosen(manifest: Manifest, options: ExportOptions) -> None:
    known = {state.spec.name: state for state in manifest.parameters}
    for name in options.parameters:
        if name not in known:
            raise UnknownParametersError(
                f"the snapshot {manifest.directory} has no parameters {name!r:.80}: it has {', '.join(known) or 'none'}"
            )


def _items(tensors: Iterable[StoredTensor], options: ExportOptions) -> list[_Item]:
    """Return tensors in file order: wide elements first, so that each is aligned to its width."""
    items: list[_Item] = []
    owners: dict[str, str] = {}
    for tensor in tensors:
        if (other := owners.setdefault(tensor.name, tensor.owner)) != tensor.owner:
            raise ConfigurationError(
                f"{other} and {tensor.owner} both have a tensor {tensor.name}: export one after the other, with "
                f"--parameters {other}"
            )
        dtype = (options.dtype if tensor.is_float else None) or tensor.dtype
        if dtype in _UNKNOWN_TO_NUMPY and options.format in _WITHOUT_BFLOAT16:
            dtype = "float32"
        items.append(_Item(tensor, dtype))
    return sorted(items, key=lambda item: -TENSOR_DTYPES[item.dtype].itemsize)


def _parts(items: Sequence[_Item], bytes_max: int) -> list[list[_Item]]:
    parts: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if parts[-1] and filled + item.bytes > bytes_max:
            parts.append([])
            filled = 0
        parts[-1].append(item)
        filled += item.bytes
    return parts


def _paths(out: Path, count: int) -> list[Path]:
    if count == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{number:05d}-of-{count:05d}{out.suffix}") for number in range(1, count + 1)]


def _index(paths: Sequence[Path], parts: Sequence[Sequence[_Item]], total: int) -> bytes:
    """Return the index in Hugging Face's format, which maps tensors to files."""
    places = {item.name: path.name for path, part in zip(paths, parts, strict=True) for item in part}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()


def _check_free(paths: Sequence[Path], overwrite: bool) -> None:
    for path in paths:
        if path.is_dir() or (path.exists() and not overwrite):
            remedy = "" if path.is_dir() else ", or add --overwrite"
            raise ConfigurationError(f"{path} exists already: choose another --out{remedy}")


@contextlib.contextmanager
def _together(out: Path) -> Iterator[Callable[[Path], contextlib.AbstractContextManager[IO[bytes]]]]:
    """Open files that appear under their names when all are complete, or not at all.

    Only the user can read a new file; one that is replaced keeps its mode.
    """
    drafts: list[tuple[Path, Path]] = []

    @contextlib.contextmanager
    def open_draft(path: Path) -> Iterator[IO[bytes]]:
        draft = path.with_name(f".{path.name}.{os.getpid()}.part")
        drafts.append((draft, path))
        draft.unlink(missing_ok=True)  # Left by a process of this number that was killed.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())

    try:
        yield open_draft
        for draft, path in drafts:
            draft.replace(path)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        for draft, _ in drafts:
            draft.unlink(missing_ok=True)


# --- values -----------------------------------------------------------------------------------------------------------


class _Source:
    """Reader of tensors. Caches the last slice, in which the next tensor often begins."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._reader = SliceReader(storage, manifest)
        self._kept: tuple[str, int, NDArray[np.float32]] | None = None

    async def chunks(self, item: _Item) -> AsyncIterator[NDArray[Any]]:
        """Iterate over the elements of a tensor in pieces; in one piece if it is stored as bytes."""
        tensor = item.tensor
        if tensor.place is None:
            yield tensor.decoded(None)
        elif tensor.is_encoded:
            pieces = [piece async for piece in self._pieces(tensor.place[0], tensor.elements)]
            yield tensor.decoded(np.concatenate([np.empty(0, np.float32), *pieces]))
        else:
            async for piece in self._pieces(tensor.place[0], tensor.elements):
                yield piece.view(tensor.place[0].spec.dtype)

    async def _pieces(self, state: ParametersState, elements: range) -> AsyncIterator[NDArray[np.float32]]:
        size = state.slicing.slice_elements
        for index in range(elements.start // size, -(-elements.stop // size) if elements else 0):
            weights = await self._weights(state, index)
            start = index * size
            yield weights[max(0, elements.start - start) : elements.stop - start]

    async def _weights(self, state: ParametersState, index: int) -> NDArray[np.float32]:
        name = state.spec.name
        if self._kept is None or self._kept[:2] != (name, index):
            self._kept = (name, index, (await self._reader.slice(state, index))[0])
        return self._kept[2]


def _cast(values: NDArray[Any], dtype: str) -> tuple[NDArray[Any], int]:
    """Cast values to a dtype, rounding to nearest. Return them, and the number that became infinite."""
    target = TENSOR_DTYPES[dtype]
    if target == values.dtype:
        return values, 0
    wide = values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = wide.astype(target)
    if target.itemsize >= wide.itemsize:
        return cast, 0
    return cast, int(np.count_nonzero(np.isinf(cast.astype(np.float32)) & np.isfinite(wide)))


# --- formats ----------------------------------------------------------------------------------------------------------

#: Start a tensor of a file, and yield the function that appends to it.
_StartTensor = Callable[[_Item], contextlib.AbstractContextManager[Callable[[Any], object]]]


@contextlib.contextmanager
def _safetensors(raw: IO[bytes], items: Sequence[_Item]) -> Iterator[_StartTensor]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in items:
        end = offset + item.bytes
        entries[item.name] = {
            "dtype": _SAFETENSORS_DTYPES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw.write(len(text).to_bytes(8, "little") + text)
    yield lambda item: contextlib.nullcontext(raw.write)


@contextlib.contextmanager
def _npz(raw: IO[bytes], items: Sequence[_Item]) -> Iterator[_StartTensor]:
    for item in items:
        if item.name.startswith("/") or "\\" in item.name or ".." in item.name.split("/"):
            raise ConfigurationError(
                f"the tensor {item.name!r:.100} cannot be in an npz file, which programs unpack: its name leads out of "
                "the directory. Use --format safetensors"
            )

    @contextlib.contextmanager
    def start_tensor(item: _Item) -> Iterator[Callable[[Any], object]]:
        with archive.open(zipfile.ZipInfo(f"{item.name}.npy"), "w", force_zip64=True) as entry:
            descr = np.lib.format.dtype_to_descr(TENSOR_DTYPES[item.dtype])
            header = {"descr": descr, "fortran_order": False, "shape": item.shape}
            np.lib.format.write_array_header_1_0(entry, header)
            yield entry.write

    with zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
        yield start_tensor


@contextlib.contextmanager
def _torch(raw: IO[bytes], items: Sequence[_Item]) -> Iterator[_StartTensor]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise ConfigurationError("--format torch needs torch: install it, or use --format safetensors") from None
    tensors = {}

    @contextlib.contextmanager
    def start_tensor(item: _Item) -> Iterator[Callable[[Any], object]]:
        data, dtype = bytearray(), getattr(torch, item.dtype)
        yield data.extend
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors[item.name] = flat.reshape(item.shape)

    yield start_tensor
    torch.save(tensors, raw)


_FILES: Final = {"safetensors": _safetensors, "npz": _npz, "torch": _torch}
