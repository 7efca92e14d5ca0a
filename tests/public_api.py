"""The public API as text: the names that users import, with their signatures.

``python -m tests.public_api`` (``make api``) rewrites ``tests/compat/api.txt``, which a review then shows as a
difference. The sources are read, not imported, so that no framework has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "tests" / "compat" / "api.txt"

#: Modules that users import. Their public names are those of ``__all__``, or all without an underscore that they define
#: or import under the same name (``import name as name``).
MODULES = (
    "psdist", "psdist.collectives", "psdist.compression", "psdist.consistency", "psdist.data", "psdist.errors",
    "psdist.hf", "psdist.jax", "psdist.lightning", "psdist.optim", "psdist.process_group", "psdist.ray",
    "psdist.torch", "psdist.trackers",
)  # fmt: skip

#: Members of a class that are public although they begin with an underscore.
_CALLS = {
    "__init__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__len__", "__getitem__",
}  # fmt: skip


def public_api() -> str:
    """Return the names and signatures of all public modules, one per line."""
    package = griffe.load("psdist", search_paths=[ROOT], resolve_aliases=True, resolve_external=False)
    found: dict[str, griffe.Object | griffe.Alias] = {}
    for name in MODULES:
        module = package if name == "psdist" else package[name.removeprefix("psdist.")]
        found |= {f"{name}.{member}": module.members[member] for member in sorted(_public_names(module))}
    public = {one.canonical_path for one in found.values()}
    return "".join(f"{line}\n" for name, one in found.items() for line in _lines(name, one, public))


def _public_names(module: griffe.Object | griffe.Alias) -> set[str]:
    if module.exports is not None:
        return {str(name) for name in module.exports} & set(module.members)
    return {
        name
        for name, member in module.members.items()
        if not name.startswith("_") and (not member.is_alias or module.imports.get(name, "").split(".")[0] == "psdist")
    }


def _lines(name: str, found: griffe.Object | griffe.Alias, public: set[str]) -> Iterator[str]:
    target = found.final_target if isinstance(found, griffe.Alias) else found
    if isinstance(target, griffe.Function):
        yield f"{name}{_signature(target)}"
    elif isinstance(target, griffe.Class):
        bases = ", ".join(str(base) for base in target.bases)
        yield f"class {name}({bases})" if bases else f"class {name}"
        for member, one in sorted(target.all_members.items()):
            # What a public class gives to its subclasses is listed there.
            is_inherited = isinstance(one, griffe.Alias) and one.inherited
            if is_inherited and one.canonical_path.rpartition(".")[0] in public:
                continue
            if member in _CALLS or not member.startswith("_"):
                yield from _lines(f"{name}.{member}", one, public)
    elif isinstance(target, griffe.Attribute):
        yield f"{name}: {target.annotation}" if target.annotation is not None else name


def _signature(function: griffe.Function) -> str:
    words: list[str] = []
    star = False
    parameters = list(function.parameters)
    for number, one in enumerate(parameters):
        kind = one.kind
        if kind is griffe.ParameterKind.keyword_only and not star:
            words.append("*")
        star = star or kind in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        typed = "" if one.annotation is None else f": {one.annotation}"
        has_default = one.default is not None and not prefix
        words.append(f"{prefix}{one.name}{typed}" + (f" = {one.default}" if has_default else ""))
        following = parameters[number + 1] if number + 1 < len(parameters) else None
        if kind is griffe.ParameterKind.positional_only and (following is None or following.kind is not kind):
            words.append("/")
    returned = "" if function.returns is None else f" -> {function.returns}"
    return f"({', '.join(words)}){returned}"


if __name__ == "__main__":
    PATH.write_text(public_api())
