"""Dataclasses whose methods are compiled at their first use are like all others."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import subprocess
import sys
from typing import Any

import pytest

from psdist.importing import _Method, quickly


def _classes(decorate: Any) -> tuple[type, type, type]:
    """Return the same three classes, the second derived from the first."""

    @decorate(frozen=True, kw_only=True)
    class Base:
        """Frozen."""

        size: int
        names: list[str] = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError(self.size)

    @decorate(frozen=True, kw_only=True)
    class Derived(Base):
        """Frozen, too."""

        extra: float = 0.5

        def __post_init__(self) -> None:
            super().__post_init__()

    @decorate(slots=True, order=True)
    class Mutable:
        """With slots."""

        first: int
        second: str = dataclasses.field(default="x", repr=False)

    return Base, Derived, Mutable


def _observed(base: Any, derived: Any, mutable: Any) -> list[Any]:
    one, other = base(size=1, names=["a"]), base(size=1)
    both = derived(size=2)
    changed = mutable(3)
    changed.second = "y"
    found = [one == other, hash(one) == hash(other), one == both, repr(one), repr(both), repr(changed)]
    found += [mutable(1) < mutable(2), sorted([changed, mutable(1)])[0].first, mutable.__hash__]
    found += [str(inspect.signature(kind)) for kind in (base, derived, mutable)]
    found += [dataclasses.replace(both, extra=1.0).extra, dataclasses.asdict(changed), copy.copy(one) == one]
    found += [both.__init__.__qualname__.rpartition(".")[2], mutable.__match_args__]
    for act in (
        lambda: setattr(one, "size", 3),
        lambda: delattr(both, "size"),
        lambda: derived(size=-1),
        lambda: base(),
        lambda: derived(2),
    ):
        with pytest.raises(Exception) as caught:  # Compared with that of the standard library.
            act()
        found.append((type(caught.value), str(caught.value)))
    return found


def test_behave_as_others() -> None:
    expected = _observed(*_classes(dataclasses.dataclass))
    with quickly():
        classes = _classes(dataclasses.dataclass)
    assert any(isinstance(one, _Method) for one in vars(classes[0]).values())
    assert _observed(*classes) == expected
    assert not isinstance(vars(classes[0])["__init__"], _Method)


def test_end_with_the_block() -> None:
    before = dataclasses._create_fn  # type: ignore[attr-defined]  # private
    with pytest.raises(ImportError), quickly():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert dataclasses._create_fn is before  # type: ignore[attr-defined]


@pytest.mark.parametrize("program", ["psdist_scheduler", "psdist_server"])
def test_programs_compile_few_methods(program: str) -> None:
    code = (
        "import dataclasses, sys\n"
        "from psdist import importing\n"
        "compiled, compile = [], importing._compile\n"
        "importing._compile = lambda *given, **named: compiled.append(given[0]) or compile(*given, **named)\n"
        f"from {program} import __main__\n"
        "with importing.quickly():\n"
        f"    import {program}.app\n"
        "print(len(compiled))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 60, f"{program} compiles {ran.stdout} methods of dataclasses while it starts"


@pytest.mark.parametrize(
    ("module", "late"),
    [
        ("psdist.client.context", "psutil structlog numba psdist.importing"),
        ("psdist_scheduler.app", "importlib.metadata numpy fastapi"),
        ("psdist.cli.run", "numpy grpc google.protobuf structlog"),
    ],
)
def test_processes_start_without_what_few_need(module: str, late: str) -> None:
    code = f"import sys; sys.modules['rich'] = None; import {module}; print(*{set(late.split())} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "\n"
