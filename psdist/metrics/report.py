"""Report of one step by a script: a few named numbers, checked, and the progress line that shows the newest ones.

The line has the most important numbers first, so that it can be truncated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psdist.errors import InvalidArgumentError, InvalidNameError
from psdist.wire.limits import METRIC_NAME_CHARACTERS_MAX, METRIC_NAMES_MAX

_NAME: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._/-]{{0,{METRIC_NAME_CHARACTERS_MAX - 1}}}")
#: Limit for one report, so that sums stay finite.
_MOST_SAMPLES: Final = 1e18
#: Metrics that psdist adds to a script's values, in output order.
MEASURED: Final = (
    *("samples", "samples_per_second", "reports", "workers", "seconds"),
    *("step_ms", "compute_ms", "push_ms", "wait_ms", "pull_ms", "communication_share", "compute_efficiency"),
    *("push_bytes", "pull_bytes", "staleness_mean", "staleness_max"),
)
#: Names that a script cannot use for its own values.
RESERVED: Final = frozenset(MEASURED) | {"step", "time"}


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one step by a script.

    values: by name; NaN and infinities are allowed.
    samples: number of samples in the step, or None if not reported.
    """

    values: Mapping[str, float]
    samples: float | None = None

    @property
    def weight(self) -> float:
        """Weight of the values in means: the samples, or 1 if not reported."""
        return 1.0 if self.samples is None else self.samples


def check_report(loss: Any, accuracy: Any, samples: Any, numbers: Mapping[str, Any]) -> StepReport:
    """Return the checked report of one step.

    loss, accuracy, samples: None if not reported.
    Raises InvalidArgumentError for values that are not numbers, for too many of them, and for ``samples`` outside 0 to
    1e18; InvalidNameError for a bad name.
    """
    values = {} if loss is None else {"loss": to_number("loss", loss)}
    if accuracy is not None:
        values["accuracy"] = to_number("accuracy", accuracy)
    for name, number in numbers.items():
        check_metric_name(name)
        values[name] = to_number(name, number)
    check_count(len(values))
    return StepReport(values, None if samples is None else _check_samples(samples))


def check_metric_name(name: str) -> None:
    """Raise InvalidNameError unless ``name`` can name a value of the script."""
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"a metric cannot be named {name!r:.80}: use 1 to {METRIC_NAME_CHARACTERS_MAX} of the characters "
            "A-Z a-z 0-9 _ . / - and begin with one of the first 63"
        )
    if name in RESERVED:
        raise InvalidNameError(f"a metric cannot be named {name!r}: psdist measures one of this name")


def check_count(count: int) -> None:
    """Raise InvalidArgumentError for more names than a worker may report."""
    if count > METRIC_NAMES_MAX:
        raise InvalidArgumentError(
            f"{count} metrics are too many: a worker may report {METRIC_NAMES_MAX} names, loss and accuracy included"
        )


def to_number(name: str, value: Any) -> float:
    """Return ``value`` as a float. Raises InvalidArgumentError if that is impossible.

    value: a number of Python or numpy, or an array or tensor without dimensions.
    """
    kind = type(value)
    if kind is float:
        return value  # type: ignore[no-any-return]  # The type was just compared.
    if kind is not int:
        if isinstance(value, str | bytes | bytearray) or _dimensions(value):
            raise _no_number(name, value)
        if hasattr(value, "detach"):  # torch warns about conversions of tensors that require gradients.
            value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_number(name, value) from None


def _dimensions(value: object) -> int:
    return int(getattr(value, "ndim", 0))


def _no_number(name: str, value: Any) -> InvalidArgumentError:
    shape = f" of shape {tuple(value.shape)}" if _dimensions(value) else f" {value!r:.40}"
    return InvalidArgumentError(
        f"metric {name!r} is not a number: it is {type(value).__name__}{shape}. Report a number, or an array or tensor "
        "without dimensions"
    )


def _check_samples(samples: Any) -> float:
    number = to_number("samples", samples)
    if not 0 <= number <= _MOST_SAMPLES:  # False for NaN.
        raise InvalidArgumentError(f"samples={number:g} is not possible: use a number from 0 to {_MOST_SAMPLES:g}")
    return number


_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def progress_line(values: Mapping[str, float], step: int) -> str:
    """Format the metrics of ``summarize``.

    ``step 1200  loss 0.01441  accuracy 0.9917  28,721 samples/s  step 4.46 ms (compute 3.1, push 0.2, wait 0.9, pull
    0.26)  communication 30%  2 workers``; staleness is shown if it is not 0.
    """
    parts = [f"step {step}"]
    parts += [f"{name} {_short(value)}" for name, value in values.items() if name not in MEASURED]
    if "samples_per_second" in values:
        parts.append(f"{_rate(values['samples_per_second'])} samples/s")
    if values.get("step_ms"):
        phases = ", ".join(f"{name} {_short(values[f'{name}_ms'], 3)}" for name in ("compute", "push", "wait", "pull"))
        parts.append(f"{_short(values['step_ms'], 3)} ms ({phases})")
        parts.append(f"communication {values['communication_share']:.0%}")
    if values.get("staleness_max"):
        parts.append(f"staleness {values['staleness_mean']:.1f}, at most {values['staleness_max']:.0f}")
    if sent := values.get("push_bytes", 0) + values.get("pull_bytes", 0):
        parts.append(f"{_bytes(sent / max(1, values['reports']))} a step")
    workers = values.get("workers", 1)
    parts.append(f"{workers:.0f} worker{'s' * (workers != 1)}")
    return "  ".join(parts)


def _short(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"
