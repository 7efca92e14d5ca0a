"""Forms of the calls of a process group, as c10d has them.

A call takes lists of tensors and an object with options: ``allreduce([tensor], options)``. c10d also takes one tensor
for a list, and options one by one: ``allreduce(tensor, op=ReduceOp.MAX, timeout=limit)``, or none. The methods of a
group are written for the first form, which is that of torch.distributed and of C++. ``call`` adds the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Kind = TypeVar("Kind", bound=type)


class Form(NamedTuple):
    """Form of a call.

    options: class of its options.
    depths: for each argument 2 for lists of lists of tensors, 1 for a list of tensors, 0 for others.
    given: options that may be given one by one, before the time limit.
    """

    options: Any
    depths: tuple[int, ...]
    given: tuple[str, ...] = ()


FORMS: Final[Mapping[str, Form]] = {
    "allgather": Form(c10d.AllgatherOptions, (2, 1)),
    "allgather_coalesced": Form(c10d.AllgatherOptions, (2, 1)),
    "all_gather_single": Form(c10d.AllgatherOptions, (0, 0)),
    "all_gather_single_coalesced": Form(c10d.AllgatherOptions, (1, 1)),
    "allreduce": Form(c10d.AllreduceOptions, (1,), ("op",)),
    "allreduce_coalesced": Form(c10d.AllreduceCoalescedOptions, (1,), ("op",)),
    "alltoall": Form(c10d.AllToAllOptions, (1, 1)),
    "all_to_all_single": Form(c10d.AllToAllOptions, (0, 0, 0, 0)),
    "barrier": Form(c10d.BarrierOptions, ()),
    "broadcast": Form(c10d.BroadcastOptions, (1,), ("root",)),
    "gather": Form(c10d.GatherOptions, (2, 1), ("root",)),
    "reduce": Form(c10d.ReduceOptions, (1,), ("root", "op")),
    "reduce_scatter": Form(c10d.ReduceScatterOptions, (1, 2), ("op",)),
    "reduce_scatter_single": Form(c10d.ReduceScatterOptions, (0, 0), ("op",)),
    "reduce_scatter_single_coalesced": Form(c10d.ReduceScatterOptions, (1, 1), ("op",)),
    "scatter": Form(c10d.ScatterOptions, (1, 2), ("root",)),
}
#: Names of calls before torch 2.12, and the present ones.
FORMER_NAMES: Final[Mapping[str, str]] = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
_ATTRIBUTES: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def call(method: Callable[..., Any]) -> Any:
    """Make a method for lists and options accept all forms of the call of its name. Others are a TypeError."""
    form = FORMS[method.__name__]
    count = len(form.depths)
    parameter = inspect.Parameter
    arguments = [*inspect.signature(method).parameters.values()][1 : 1 + count]
    chosen = [*form.given, "timeout", "opts"]
    signature = inspect.Signature(
        [*arguments, *(parameter(name, parameter.POSITIONAL_OR_KEYWORD, default=None) for name in chosen)]
    )

    options, is_listed = form.options, form.depths[:1] > (0,)

    @wraps(method)
    def made(self: Any, *given: Any, **named: Any) -> Any:
        if len(given) == count + 1 and type(given[count]) is options and (not is_listed or type(given[0]) is list):
            return method(self, *given, **named)
        return method(self, *_plain(form, signature, given, named))

    return made


def _plain(
    form: Form, signature: inspect.Signature, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments with lists and options."""
    count = len(form.depths)
    if len(given) == count + 1 and isinstance(given[count], form.options):
        given, named = given[:count], {"opts": given[count], **named}
    found = signature.bind(*given, **{_parameter(signature, key): value for key, value in named.items()})
    found.apply_defaults()
    *arguments, options = found.args
    options = form.options() if options is None else options
    for name in (*form.given, "timeout"):
        if found.arguments[name] is not None:
            setattr(options, _ATTRIBUTES[name], found.arguments[name])
    return (*map(_nested, arguments, form.depths), options)


def _parameter(signature: inspect.Signature, key: str) -> str:
    """Return the parameter that is meant. c10d has "output", "output_tensor" and "output_tensors" for one thing."""
    if key in signature.parameters:
        return key
    return next((name for name in signature.parameters if name[:5] == key[:5]), key)


def _nested(value: Any, depth: int) -> Any:
    """Return tensors in lists of ``depth``. c10d lets the outer list out if it has one entry."""
    if depth == 2 and isinstance(value, Tensor):
        raise TypeError("a tensor stands in the place of a list: give lists of tensors")
    if (depth == 1 and isinstance(value, Tensor)) or (depth == 2 and value and isinstance(value[0], Tensor)):
        return [value]
    return value


def opaque(kind: Kind) -> Kind:
    """Let torch.compile neither trace nor compile the methods of a class, and the functions that they call.

    C++ calls them while compiled code runs, for example when DistributedDataParallel forms other buckets.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.4 lacks it.
        skip = frames._FrameAction.SKIP
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return kind
