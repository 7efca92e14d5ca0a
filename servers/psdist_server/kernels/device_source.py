"""Source of the device's kernels: ``update.cu``, and each optimizer's arithmetic (``kernels.arithmetic``).

An optimizer's arithmetic is one Python function of single elements. This module translates it to CUDA C, operation by
operation, so that numpy, numba and devices share one source; each of them rounds every float32 operation by itself.
``_Translator`` defines the supported subset of Python. Anything else raises InternalError when the text is generated,
and the tests generate all of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from psdist.device.device import common_source
from psdist.errors import InternalError
from psdist_server.kernels.interpreted import BLOCK, SUM_LANES
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
        return InternalError(f"no CUDA C for {ast.unparse(node)!r}: teach it to psdist_server.kernels.device_source")


def _literal(value: np.float32) -> str:
    """Return a float32 constant as its bits."""
    return f"__uint_as_float({value.view(np.uint32):#x}u)"
