"""Parameters on a device: ``DenseParameters`` that stores and updates weights and state there.

The weights and the state of a slice are on the device. The slices of a shard share one allocation, so that shards come
and go with their memory. After each update the weights are also copied to the host, before the slice counts as updated.
So everything that reads weights (workers in shared memory, messages, TCP connections, digests, snapshots) reads the
same memory as without a device, under the same sequence numbers. A server sends each update's weights to its workers
anyway, so the copy is not wasted. The state is copied to the host on demand (``export``). P parameters with Adam cost
12 x P bytes of the device, and 4 x P of the host.

Contributions are copied to areas of pinned memory, each once, and from there to the device while other kernels run. If
some are encoded or have weights, the processor adds them up and only their sum is copied. A kernel thread holds a
``Lane`` while it updates slices. A lane has two areas: the processor copies contributions into one while the copies and
the kernel of the other are running. All areas are allocated before the first slice is held, and are never freed. An
update allocates nothing, so it cannot run out of memory midway. All parameter sets of the process share the areas.

Invariants: The bytes of weights, state, means and sums of squares are those of ``DenseParameters``. An area is reused
only after all its operations are complete. A lane that is returned is idle, so nothing is written to the caller's
memory afterwards.

The source of the kernels is ``update.cu`` and each optimizer's arithmetic (``kernels.arithmetic``). An optimizer's
arithmetic is one Python function of single elements. This module translates it to CUDA C, operation by operation, so
that numpy, numba and devices share one source; each of them rounds every float32 operation by itself. ``_Translator``
defines the supported subset of Python. Anything else raises InternalError when the text is generated, and the tests
generate all of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.device.device import Allocation, Device, DeviceKernel, common_source
from psdist.errors import DeviceLostError, InternalError
from psdist.types import ParametersEntry
from psdist_server.kernels.arrays import Array, Bad, DenseParameters, Gradient, GroupSegment, SegmentJob, division_of
from psdist_server.kernels.interpreted import BLOCK, CODES, DTYPES, SUM_LANES, AnyArray, division_by
from psdist_server.kernels.updates import UPDATES

#: Array and scalar parameters of every kernel: the maximum over all optimizers.
ARRAYS: Final = 4
SCALARS: Final = 10
#: Threads per block.
THREADS: Final = 256

_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_CALLS: Final = {"np.sqrt": "sqrtf", "np.abs": "fabsf", "abs": "fabsf"}


@cache
def update_source(*names: str) -> str:
    """Return the source of ``update_NAME`` for each of these optimizers, and of the other kernels of ``update.cu``."""
    template = (Path(__file__).parent / "update.cu").read_text(encoding="utf-8")
    numbers = {"BLOCK": BLOCK, "SUM_LANES": SUM_LANES, "THREADS": THREADS, "ARRAYS": ARRAYS, "SCALARS": SCALARS}
    constants = "".join(f"#define {name} {number}\n" for name, number in numbers.items())
    kernels = (_kernel(name, kernel.element) for name, kernel in UPDATES.items() if name in names)
    return "\n".join((common_source(), constants, template, *kernels))


def _kernel(name: str, element: Callable[..., Any]) -> str:
    """Return the CUDA C of one optimizer.

    name: the optimizer's, which names the kernel ``update_NAME``.
    element: its update of one element, in Python.

    The kernel updates ``size`` elements from the address of each array on; absent arrays are 0. ``staged`` holds
    ``size`` elements of each contribution. ``mean`` is the address that the mean is written to; 0 for none.
    """
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(element))).body
    assert isinstance(function, ast.FunctionDef)
    translator = _Translator(function, inspect.getmodule(element).__dict__)
    names, results = translator.arguments, translator.results
    states = len(results)
    loads = [f"const float {one} = own[{number}];" for number, one in enumerate(names[:states])]
    scalars = [f"const float {one} = scalars.at[{number}];" for number, one in enumerate(names[states + 1 :])]
    stores = [f"own[{number}] = {result};" for number, result in enumerate(results)]
    body = "\n        ".join([*loads, *scalars, *translator.lines, *stores])
    arrays, given = [f"a{number}" for number in range(ARRAYS)], [f"k{number}" for number in range(SCALARS)]
    return f"""
struct {name}_element {{
    static const int COUNT = {states};
    static __device__ __forceinline__ void update(float* own, float {names[states]}, Scalars scalars) {{
        {body}
    }}
}};
extern "C" __global__ void __launch_bounds__(THREADS) update_{name}(
    {", ".join(f"float* {one}" for one in arrays)}, i64 size, const u8* staged, u64 first_flag, i64 count,
    float divisor, float factor, float* mean,
    {", ".join(f"float {one}" for one in given)}
) {{
    Staged contributions = {{staged, (u8*)staged + first_flag, (int)count}};
    Arrays arrays = {{{{{", ".join(arrays)}}}}};
    Scalars scalars = {{{{{", ".join(given)}}}}};
    update<{name}_element>(arrays, size, contributions, {{divisor, factor}}, mean, scalars);
}}
"""


class _Translator:
    """Translates the body of an element function to CUDA C.

    arguments: names of the weights, state, gradient and scalars, in this order.
    lines: the statements.
    results: expressions of the new weights and the new state.
    """

    def __init__(self, function: ast.FunctionDef, module: Mapping[str, Any]) -> None:
        self._module = module
        self.arguments = [argument.arg for argument in function.args.args]
        self._known = set(self.arguments)
        self.lines: list[str] = []
        self.results: list[str] = []
        for statement in function.body[1:] if ast.get_docstring(function) else function.body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                text = self._expression(value)
                self.lines.append(f"{'' if name in self._known else 'float '}{name} = {text};")
                self._known.add(name)
            case ast.Return(value=ast.Tuple(elts=elements)):
                self._return(elements)
            case ast.Return(value=ast.expr() as value):
                self._return([value])
            case _:
                raise self._unknown(node)

    def _return(self, values: list[ast.expr]) -> None:
        """Evaluate all results before the first is stored."""
        for number, value in enumerate(values):
            self.lines.append(f"const float result{number} = {self._expression(value)};")
            self.results.append(f"result{number}")

    def _expression(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self._known:
                return name
            case ast.Name(id=name) if isinstance(self._module.get(name), np.float32):
                return _literal(self._module[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self._expression(operand)})"
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return f"({self._expression(left)} {_OPERATORS[type(operator)]} {self._expression(right)})"
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _OPERATORS:
                return f"({self._expression(left)} {_OPERATORS[type(operator)]} {self._expression(right)})"
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._call(node, ast.unparse(function), [self._expression(one) for one in arguments])
            case _:
                raise self._unknown(node)

    def _call(self, node: ast.expr, called: str, arguments: list[str]) -> str:
        if called == "select" and len(arguments) == 3:
            return f"({arguments[0]} ? {arguments[1]} : {arguments[2]})"
        if called in _CALLS and len(arguments) == 1:
            return f"{_CALLS[called]}({arguments[0]})"
        raise self._unknown(node)

    def _unknown(self, node: ast.AST) -> InternalError:
        return InternalError(
            f"no CUDA C for {ast.unparse(node)!r}: teach it to psdist_server.kernels.device_parameters"
        )


def _literal(value: np.float32) -> str:
    """Return a float32 constant as its bits."""
    return f"__uint_as_float({value.view(np.uint32):#x}u)"


#: Alignment of a slice's arrays, in elements: 256 bytes.
_ALIGNMENT: Final = 64
_PAGE: Final = 4096
#: Minimum size in bytes of slices whose weights are registered, so that copies to them overlap with kernels.
REGISTERED_BYTES: Final = 1 << 20
#: Lanes for updates: the number of threads that can copy at the same time. One more lane is for reads.
LANES: Final = 4
AREAS: Final = 2
#: Bytes of contributions in an area, and elements of a kernel's output other than weights and state.
STAGED_BYTES: Final = 8 << 20
OUT_ELEMENTS: Final = 1 << 20
_AREA_ALIGNMENT: Final = 256


class DeviceParameters(DenseParameters):
    """The slices of ``entry`` that this server holds a copy of, on the device of ``lanes``."""

    def __init__(self, entry: ParametersEntry, lanes: Lanes) -> None:
        super().__init__(entry, has_states=False)
        self._lanes = lanes
        self._device = lanes.device
        self._shards = max(1, len(entry.shards))
        #: By slice: the memory of its shard, and the slice's address in it.
        self._places: dict[int, tuple[Allocation, int]] = {}
        self._registered: dict[int, Array] = {}
        with lanes.watched():
            #: By group.
            self._updates: list[DeviceKernel] = [
                lanes.kernels(f"update_{kernel.__name__}") for kernel in self.rule.kernels
            ]
            self._narrow: DeviceKernel = lanes.kernels("narrow")
            self._combine: DeviceKernel = lanes.kernels("combine")
            self._sum_squares: DeviceKernel = lanes.kernels("sum_squares")

    def hold(self, indices: Iterable[int]) -> None:
        new = sorted(set(indices) - self.held)
        self._lanes.prepare()
        with self._lanes.watched():
            self._places |= self._allocated(new)
        try:
            super().hold(new)
        except BaseException:
            for index in new:
                del self._places[index]
            raise
        for index in new:
            self._register(index)

    def _allocated(self, indices: Sequence[int]) -> dict[int, tuple[Allocation, int]]:
        """Allocate memory for slices: one allocation per shard."""
        by_shard: dict[int, list[int]] = {}
        for index in indices:
            by_shard.setdefault(index % self._shards, []).append(index)
        places: dict[int, tuple[Allocation, int]] = {}
        for group in by_shard.values():
            sizes = [self._pitch(index) * (1 + len(self.rule.state_names)) for index in group]
            memory = self._device.allocate(sum(sizes))
            address = memory.address
            for index, size in zip(group, sizes, strict=True):
                places[index] = memory, address
                address += size
        return places

    def _pitch(self, index: int) -> int:
        """Return the bytes from one array of a slice to the next."""
        return -(-self.slicing.size(index) // _ALIGNMENT) * _ALIGNMENT * 4

    def _register(self, index: int) -> None:
        weights = self.export_weights(index)
        size, address = weights.nbytes, weights.__array_interface__["data"][0]
        # Only whole pages: the target of a copy must not be registered in part.
        if size >= REGISTERED_BYTES and not address % _PAGE and not size % _PAGE and self._device.register(weights):
            self._registered[index] = weights

    def release(self, indices: Iterable[int]) -> None:
        gone = self.held.intersection(indices)
        self._unregister(gone)
        super().release(gone)
        for index in gone:
            del self._places[index]

    def _unregister(self, indices: Iterable[int]) -> None:
        for index in indices:
            if (weights := self._registered.pop(index, None)) is not None:
                with self._lanes.watched():
                    self._device.unregister(weights)

    def close(self) -> None:
        """Free the arena and the device's memory. No kernel may be running."""
        try:
            self._unregister(list(self._registered))
        except DeviceLostError:  # Already reported; a lost device holds nothing.
            self._registered.clear()
        self._places.clear()
        super().close()

    def export(self, index: int) -> list[Array]:
        """Return the arrays of a slice: its weights, in place on the host, and copies of its state."""
        weights, *published = super().export(index)
        states = [np.empty(weights.size, np.float32) for _ in self.rule.state_names]
        with self._lanes.reading() as area:
            for state, address in zip(states, self._addresses(index)[1:], strict=True):
                self._device.copy_out(state, address, area.stream)
        return [weights, *states, *published]

    def _stored(self, index: int, arrays: Mapping[int, Array]) -> None:
        with self._lanes.reading() as area:
            for number, address in enumerate(self._addresses(index)):
                if number in arrays:
                    self._device.copy_in(address, np.ascontiguousarray(arrays[number]), area.stream)

    def _addresses(self, index: int) -> list[int]:
        _, first = self._places[index]
        return [first + number * self._pitch(index) for number in range(1 + len(self.rule.state_names))]

    def read(self, index: int, dtype: str) -> memoryview:
        if dtype not in ("float16", "bfloat16") or self.published is not None or index not in self.held:
            return super().read(index, dtype)
        size, wanted = self.slicing.size(index), DTYPES[dtype]
        out = np.empty(size, np.uint16)
        most = piece_elements((out, out))
        for at in range(0, size, most):
            count, address = min(most, size - at), np.uint64(self._addresses(index)[0] + 4 * at)
            with self._lanes.reading() as area:
                arguments = (address, np.uint64(area.out), np.int64(count), np.int64(CODES[wanted]))
                area.launch(self._narrow, count, *arguments, threads=THREADS)
                area.result(out[at : at + count], area.out)
        return out.view(np.uint8).data

    def combine(
        self, index: int, parts: Sequence[Gradient], is_encoded: bool = False, weights: tuple[float, ...] = ()
    ) -> tuple[Array | None, float, Bad]:
        if parts and not is_encoded and not weights:
            mean = np.empty(self.slicing.size(index), np.float32)
            with self._lanes.lane() as lane:
                square, is_finite = self._combine_on_device(lane.next(), mean, parts)
            if is_finite:
                return mean, square, ()
        # Needs decoding by the processor, or is rare.
        return super().combine(index, parts, is_encoded, weights)

    def _combine_on_device(self, area: StagingArea, mean: Array, parts: Sequence[Gradient]) -> tuple[float, bool]:
        """Write the mean of the parts to ``mean``. Returns its sum of squares, and True if all of it is finite."""
        bad: list[bool] = []
        sums, most = np.empty(SUM_LANES, np.float64), piece_elements(parts)
        self._device.clear(area.sums, sums.nbytes, area.stream)
        for at in range(0, mean.size, most):
            size, out = min(most, mean.size - at), np.uint64(area.out)
            area.finish()
            area.stage(parts, at, size)
            division = division_by(1 if self.sums else len(parts))
            given: tuple[np.generic, ...] = (np.int64(size), *_staged(area), *division)
            area.launch(self._combine, size, *given, out, threads=THREADS)
            area.launch(self._sum_squares, 1, out, np.int64(size), np.uint64(area.sums), threads=THREADS)
            area.result(mean[at : at + size], area.out)
            area.flags(lambda flags: bad.append(bool(flags[0])))
        area.finish()
        area.result(sums, area.sums)
        area.finish()
        while sums.size > 1:
            sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
        return float(sums[0]), not any(bad)

    def _run(self, jobs: Sequence[SegmentJob], scalars: tuple[np.float32, ...]) -> list[tuple[int, list[int]]]:
        bad: list[set[int]] = [set() for _ in jobs]
        padded = (*scalars, *[np.float32(0.0)] * (SCALARS - len(scalars)))
        with self._lanes.lane() as lane:
            for row, job in enumerate(jobs):
                self._update_segment(lane, job, padded, bad[row])
        return [(row, sorted(found)) for row, found in enumerate(bad) if found]

    def _update_segment(self, lane: Lane, job: SegmentJob, scalars: tuple[np.float32, ...], bad: set[int]) -> None:
        _, update, segment = job
        most = piece_elements(update.parts)
        weights = self.export_weights(update.index)[segment.start : segment.start + segment.size]
        for at in range(0, segment.size, most):
            size, area = min(most, segment.size - at), lane.next()
            area.stage(update.parts, segment.start + at, size)
            mean = np.uint64(area.out if update.mean is not None else 0)
            given: tuple[np.generic, ...] = (
                *_arrays(segment, at),
                np.int64(size),
                *_staged(area),
                *division_of(update, self.sums),
            )
            area.launch(self._updates[segment.group], size, *given, mean, *scalars, threads=THREADS)
            self._device.copy_out(weights[at : at + size], segment.addresses[0] + 4 * at, area.stream)
            if update.mean is not None:
                area.result(update.mean[segment.start + at : segment.start + at + size], area.out)
            area.flags(lambda flags: bad.update(np.flatnonzero(flags).tolist()))


def _arrays(segment: GroupSegment, at: int) -> list[np.uint64]:
    """Return the addresses of a segment's arrays, from element ``at``."""
    addresses = [np.uint64(address + 4 * at) for address in segment.addresses]
    return [*addresses, *[np.uint64(0)] * (ARRAYS - len(addresses))]


def _staged(area: StagingArea) -> tuple[np.uint64, np.uint64, np.int64]:
    return np.uint64(area.contributions), np.uint64(area.first_flag), np.int64(area.count)


class StagingArea:
    """Memory for one launch: its inputs, its outputs, and the stream of both.

    out: address of float32[OUT_ELEMENTS] on the device.
    sums: address of float64[SUM_LANES] on the device.
    results: pinned memory for outputs.
    contributions, first_flag, count: the last staged contributions, as the kernels take them.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream()
        self._staged = device.allocate(STAGED_BYTES)
        self._pinned = device.pinned(STAGED_BYTES)
        self._out = device.allocate(4 * OUT_ELEMENTS)
        self.results = device.pinned(4 * OUT_ELEMENTS)
        self.out = self._out.address
        self._sums = device.allocate(8 * SUM_LANES)
        self.sums = self._sums.address
        self.contributions = self.first_flag = self.count = 0
        self._endings: list[Callable[[], None]] = []

    def stage(self, parts: Sequence[AnyArray], start: int, size: int) -> None:
        """Copy elements [start, start + size) of contributions to the device, as the kernels of ``update.cu`` read
        them."""
        self.count, self.first_flag = len(parts), 16 * len(parts)
        table = np.empty((len(parts), 2), np.uint64)
        end = _aligned(self.first_flag + self.count)
        for row, part in enumerate(parts):
            table[row] = end, CODES[part.dtype]
            end += _aligned(size * part.itemsize)
        self._grow(end)
        self._pinned[: self.first_flag] = table.reshape(-1).view(np.uint8)
        self._pinned[self.first_flag : self.first_flag + self.count] = 0
        for (at, _), part in zip(table.tolist(), parts, strict=True):
            values = part[start : start + size].view(np.uint8)
            self._pinned[at : at + values.size] = values
        self.contributions = self._staged.address
        self.device.copy_in(self.contributions, self._pinned[:end], self.stream)

    def _grow(self, size: int) -> None:
        """Make room for ``size`` bytes: one block of very many contributions may exceed the area."""
        if size > self._pinned.size:
            self._staged = self.device.allocate(size)
            self._pinned = self.device.pinned(size)

    def launch(self, kernel: DeviceKernel, elements: int, *arguments: np.generic, threads: int) -> None:
        """Run a kernel with one block of threads per BLOCK elements."""
        self.device.launch(kernel, max(1, -(-elements // BLOCK)), threads, arguments, self.stream)

    def flags(self, take: Callable[[NDArray[np.uint8]], None]) -> None:
        """Fetch the flags of the contributions, and pass them to ``take`` once the launch is complete."""
        part = self._pinned[self.first_flag : self.first_flag + self.count]
        self.device.copy_out(part, self.contributions + self.first_flag, self.stream)
        self._endings.append(lambda: take(part))

    def result(self, out: AnyArray, address: int) -> None:
        """Copy a kernel's output at ``address`` to ``out``, through pinned memory."""
        part = self.results[: out.nbytes].view(out.dtype)
        self.device.copy_out(part, address, self.stream)
        self._endings.append(lambda: np.copyto(out, part))

    def finish(self) -> None:
        """Wait until all operations are complete and the outputs are in place."""
        self.device.wait(self.stream)
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def abandon(self) -> None:
        """Discard all outputs and wait for the device."""
        self._endings.clear()
        with suppress(DeviceLostError):
            self.device.wait(self.stream)


class Lane:
    """The areas of one thread."""

    def __init__(self, device: Device, areas: int = AREAS) -> None:
        self._areas = [StagingArea(device) for _ in range(areas)]
        self._next = 0

    def next(self) -> StagingArea:
        """Return an idle area: the least recently used one."""
        area = self._areas[self._next]
        self._next = (self._next + 1) % len(self._areas)
        area.finish()
        return area

    def finish(self) -> None:
        """Wait until all areas are idle."""
        for area in self._areas:
            area.finish()

    def abandon(self) -> None:
        """Discard all outputs after an error."""
        for area in self._areas:
            area.abandon()


class Lanes:
    """The lanes of a process, and its device.

    lost: called, in any thread, with the error after which the device is unusable.
    """

    def __init__(self, device: Device, lost: Callable[[DeviceLostError], None] = lambda error: None) -> None:
        self.device = device
        self._lost = lost
        self._free: list[Lane] = []
        self._reading: Lane | None = None
        self._changed = threading.Condition()
        self._reads = threading.Lock()
        #: Returns a kernel of the device by name.
        self.kernels = device.kernels(update_source(*UPDATES))

    def prepare(self) -> None:
        """Allocate the lanes, unless this was done. Raises LimitExceededError if there is no room for all of them; none
        is kept then."""
        with self._changed, self.watched():
            if self._reading is None:
                lanes, reading = [Lane(self.device) for _ in range(LANES)], Lane(self.device, 1)
                self._free, self._reading = lanes, reading

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Borrow a lane for updates, allocated by ``prepare``. Waits while all are in use."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            lane = self._free.pop()
        try:
            with self.used(lane):
                yield lane
        finally:
            with self._changed:
                self._free.append(lane)
                self._changed.notify()

    @contextmanager
    def reading(self) -> Iterator[StagingArea]:
        """Borrow the area for reads. It is separate, so that the event loop does not wait for updates in kernel
        threads."""
        assert self._reading is not None, "prepare comes first"
        with self._reads, self.used(self._reading):
            yield self._reading.next()

    @contextmanager
    def used(self, lane: Lane) -> Iterator[None]:
        """Complete all work in a lane on exit; discard it on an error."""
        try:
            with self.watched():
                yield
                lane.finish()
        except BaseException:
            lane.abandon()
            raise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report a lost device."""
        try:
            yield
        except DeviceLostError as error:
            self._lost(error)
            raise


def piece_elements(parts: Sequence[AnyArray]) -> int:
    """Return how many elements of these contributions fit in one area: a multiple of BLOCK."""
    room = STAGED_BYTES - _aligned(17 * len(parts)) - _AREA_ALIGNMENT * len(parts)
    fitting: int = room // max(1, sum(part.itemsize for part in parts))
    return max(BLOCK, min(OUT_ELEMENTS, fitting) // BLOCK * BLOCK)


def _aligned(size: int) -> int:
    return -(-size // _AREA_ALIGNMENT) * _AREA_ALIGNMENT
