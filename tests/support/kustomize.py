"""Rendering of kustomizations as ``kubectl kustomize`` does it, for those fields that the generated files use."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any, Final

import yaml

Object = dict[str, Any]

#: Lists that a strategic merge joins, by the field that names their items. Others are replaced.
_KEYS: Final = {
    "containers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
_FIELDS: Final = {"apiVersion", "kind", "resources", "patches", "secretGenerator", "generatorOptions"}
_DELETE: Final = {"$patch": "delete"}


def load(path: Path) -> list[Object]:
    """Return the documents of a file."""
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each is not None]


def render(folder: Path) -> list[Object]:
    """Return the objects of a folder with a kustomization, which must name every file beside it."""
    (kustomization,) = load(folder / "kustomization.yaml")
    assert kustomization.keys() <= _FIELDS, kustomization.keys() - _FIELDS
    found: list[Object] = []
    for name in kustomization["resources"]:
        found += render(folder / name) if (folder / name).is_dir() else load(folder / name)
    found += [_secret(folder, each) for each in kustomization.get("secretGenerator", ())]
    for each in kustomization.get("patches", ()):
        _apply(found, yaml.safe_load(each["patch"]))
    named = {"kustomization.yaml", *kustomization["resources"]}
    named |= {file for each in kustomization.get("secretGenerator", ()) for file in each["files"]}
    assert {path.name for path in folder.iterdir()} - {".gitignore"} <= named
    names = [identity(each) for each in found]
    assert len(set(names)) == len(names), names
    return found


def identity(obj: Object) -> tuple[str, str]:
    """Return kind and name."""
    return obj["kind"], obj["metadata"]["name"]


def _secret(folder: Path, generator: Object) -> Object:
    data = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in generator["files"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": generator["name"]},
        "type": "Opaque",
        "data": data,
    }


def _apply(objects: list[Object], patch: Object) -> None:
    (position,) = [at for at, each in enumerate(objects) if identity(each) == identity(patch)]
    assert objects[position]["apiVersion"] == patch["apiVersion"]
    if _DELETE.items() <= patch.items():
        del objects[position]
    else:
        objects[position] = _merge(objects[position], patch)


def _merge(old: Object, patch: Object) -> Object:
    merged = copy.deepcopy(old)
    for name, value in patch.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merge(merged[name], value)
        elif value is None:
            del merged[name]
        elif isinstance(value, list) and name in _KEYS:
            merged[name] = _merge_lists(merged.get(name, []), value, _KEYS[name])
        else:
            merged[name] = value
    return merged


def _merge_lists(old: list[Object], patch: list[Object], key: str) -> list[Object]:
    merged = list(old)
    for item in patch:
        at = next((at for at, each in enumerate(merged) if each[key] == item[key]), None)
        if _DELETE.items() <= item.items():
            assert at is not None, f"there is no {item[key]} to delete"
            del merged[at]
        elif at is None:
            merged.append(item)
        else:
            merged[at] = _merge(merged[at], item)
    return merged
