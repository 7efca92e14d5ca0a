"""``psdist.launch`` without a run: values and functions that travel, settings, and reports."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import psdist
from psdist.errors import ConfigurationError, InternalError, InvalidArgumentError, LimitExceededError
from psdist.launcher import function_calls
from psdist.launcher.function_calls import (
    decode_value,
    encode_value,
    import_name,
    load_function,
    read_values,
    run_call,
    write_call,
)
from psdist.settings.launcher_reports import RunReport

_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_ARRAYS = st.sampled_from(["f4", "f8", "i1", "u8", "?", "c8", "U3", ">i2"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
)
_VALUES = st.recursive(
    _PLAIN | _ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(first: Any, second: Any) -> bool:
    """True if two values are equal, of the same types, dtypes and shapes."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray | np.generic):
        return (
            first.dtype == second.dtype and np.shape(first) == np.shape(second) and first.tobytes() == second.tobytes()
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    return bool(first == second)


async def waits() -> None:
    pass


def returns(value: Any = None, *, raised: str = "") -> Any:
    """Return ``value``, as a function of a worker."""
    if raised:
        raise ValueError(raised)
    return value


class Model:
    @classmethod
    def train(cls) -> str:
        return cls.__name__


def made(qualname: str = "") -> Any:
    """Return a function that is made by running code."""

    def inner() -> None: ...

    inner.__qualname__ = qualname or inner.__qualname__
    return inner


# --- values -----------------------------------------------------------------------------------------------------------


@given(_VALUES)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    assert same(decode_value(encode_value(value, "it")), value)


def test_scalars_of_numpy_stay_scalars() -> None:
    for scalar in (np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("x")):
        assert same(decode_value(encode_value([scalar], "it")), [scalar])


def test_other_values_are_refused_with_the_remedy() -> None:
    for value, text in [
        ([b"x"], "contains a bytes, which does not travel: convert it by numpy.frombuffer"),
        ({"a": {1}}, "contains a set, which does not travel: pass None, numbers, text"),
        (np.array([object()]), "contains an array of object"),
        (np.zeros(2, ml_dtypes.bfloat16), "contains an array of bfloat16"),
        (SimpleNamespace(), "contains a SimpleNamespace"),
    ]:
        with pytest.raises(InvalidArgumentError, match=f"^the result {text}"):
            encode_value(value, "the result")


def test_a_value_in_itself_and_a_large_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArgumentError, match="or in itself"):
        encode_value(loop, "it")
    monkeypatch.setattr(function_calls, "LAUNCH_VALUE_BYTES_MAX", 100)
    with pytest.raises(LimitExceededError, match="it has 404 bytes, more than 100: write it to a file"):
        encode_value(np.zeros(98, np.float32), "it")


@given(st.binary(max_size=40))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="are not a value"):
        decode_value(data)


# --- functions --------------------------------------------------------------------------------------------------------


def test_functions_are_found_by_their_names() -> None:
    for function in [returns, Model.train, np.linalg.norm, len]:
        assert load_function(import_name(function)) == function


def test_functions_without_an_import_name_are_refused() -> None:
    for function, text in [
        (lambda: None, "cannot be imported by name, since it is made by running code: define it with def"),
        (made(), "cannot be imported by name, since it is made by running code: define it with def"),
        (partial(returns, 3), "type partial has no name to import it by: pass a function, and its arguments as args="),
        (made("returns"), "returns is not the function that was passed, but another"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            import_name(function)


def test_functions_of_main_are_imported_by_the_name_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main: Any = ModuleType("__main__")
    main.work = made("work")
    main.work.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ConfigurationError, match=r"work is defined in __main__, .*%%writefile work.py"):
        import_name(main.work)  # a notebook
    main.__file__ = str(tmp_path / "some_script.py")
    (tmp_path / "some_script.py").touch()
    with pytest.raises(ConfigurationError, match="work is defined in __main__"):
        import_name(main.work)  # a script whose directory is not on the path
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_name(main.work) == "some_script:work"
    main.__spec__ = SimpleNamespace(name="package.module")
    assert import_name(main.work) == "package.module:work"


def test_a_function_that_the_worker_does_not_find_is_named() -> None:
    with pytest.raises(ConfigurationError, match="there is no function gone in module json, as a worker imports it"):
        load_function("json:gone")


def test_a_call_and_its_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_call(tmp_path, returns, [{"a": (1, 2)}], {})
    for rank in ("10", "9"):
        monkeypatch.setenv("RANK", rank)
        run_call(tmp_path)
    assert list(read_values(tmp_path).items()) == [(9, {"a": (1, 2)}), (10, {"a": (1, 2)})]
    write_call(tmp_path, made, [], {})
    with pytest.raises(InvalidArgumentError, match=r"the return value of .*:made contains a function"):
        run_call(tmp_path)


# --- psdist.launch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nproc_per": 2}, r"psdist.launch\(\) has no argument nproc_per: did you mean nproc_per_node"),
        ({"num_workers": 2}, "has no argument num_workers: use nproc_per_node=N for"),
        ({"resume": True}, "has no argument resume: give the run a run_id=NAME"),
        ({"nproc_per_node": 0}, "^nproc_per_node: 0 is too small"),
        ({"report_file": "x"}, "has no argument report_file"),
        ({"nservers": 1, "replicas": 2}, "^replicas=2 needs at least as many servers, not nservers=1"),
        ({"signals_to_handle": ["SIGTERM", "KILL"]}, "^signals_to_handle: 'KILL' is not the name"),
        ({"args": [1, 2]}, r"returns\(value.* cannot be called so: too many positional arguments. Pass its arguments"),
        ({"kwargs": {"valeu": 1}}, "got an unexpected keyword argument 'valeu'"),
        ({"target": waits}, r"waits is async: pass a function that calls asyncio.run\(waits"),
        ({"module": True}, "module= is for scripts, and the target is a function"),
        ({"timeout": 0}, "timeout=0 is not possible"),
        ({"args": [psdist]}, "an argument of .*:returns contains a module"),
        ({"target": "gone.py"}, "the script .*gone.py does not exist"),
        ({"target": __file__, "kwargs": {"a": 1}}, "kwargs= are for a function"),
        ({"target": __file__, "args": [[1]]}, r"the argument \[1\] of the script is list: pass text"),
        ({"target": 3}, "the target 3 is neither a path nor a function"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=text):
        psdist.launch(**{"target": returns, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_worker_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", "/somewhere")
    with pytest.raises(ConfigurationError, match=r"in a worker of a run, where it would start another.*__main__"):
        psdist.launch(__file__)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    report = RunReport("run", 1, "worker 3 failed", "worker 3", 3, ("Traceback", "E: \ud800"))
    assert RunReport.read(tmp_path / "report") is None
    report.write(tmp_path / "report")
    assert RunReport.read(tmp_path / "report") == report
    report.write(tmp_path / "no directory" / "report")  # The run ends as it would.
    (tmp_path / "report").write_text('{"lines": []}')
    with pytest.raises(InternalError, match=r"the report on a run in .* cannot be read"):
        RunReport.read(tmp_path / "report")
