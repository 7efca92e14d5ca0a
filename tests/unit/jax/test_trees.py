"""Names of leaves, checks of trees, and the memory of trees."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.jax import trees
from psdist.jax.trees import TreeForm, names_of
from psdist.types import check_tensor_name


def names(tree: Any) -> list[str]:
    return names_of([path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]])


class Pair(NamedTuple):
    one: Any
    other: Any


keys = st.text(max_size=4) | st.sampled_from(["a.b", "a", "b", ".", "%", "%2e", "['a']", "\n", "\ud800", ""])
any_tree = st.recursive(
    st.just(1.0),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(keys, inner, min_size=1, max_size=3)
        | st.dictionaries(st.integers(-3, 3), inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@given(tree=any_tree)
def test_leaves_of_any_tree_have_names_of_their_own(tree: Any) -> None:
    found = names(tree)
    assert len(set(found)) == len(found) == len(jax.tree.leaves(tree))
    for name in found:
        check_tensor_name(name[:20])
        assert not name.startswith("."), "names of the averager's own tensors"


def test_names_are_those_of_a_torch_model() -> None:
    assert names({"layers": [{"w": 0.0}, Pair(1.0, (2.0,))]}) == ["layers.0.w", "layers.1.one", "layers.1.other.0"]
    assert names({"mlp/~/linear": 0.0, "a.b": 1.0}) == ["a%2eb", "mlp/~/linear"]
    assert names(jnp.zeros(3)) == ["value"]
    assert names(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)) == ["bias", "kernel"]
    model = eqx.filter(eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    assert names(model)[:2] == ["layers.0.weight", "layers.0.bias"]


def test_keys_that_look_the_same_are_refused() -> None:
    class Key(str):
        __slots__ = ("mark",)

        def __hash__(self) -> int:
            return id(self)

        def __eq__(self, other: object) -> bool:
            return self is other

    with pytest.raises(InvalidArgumentError, match="two leaves of the tree have the name 'a': use keys that differ"):
        names({Key("a"): 0.0, Key("a"): 1.0})


def test_what_is_no_tree_of_floats_is_refused() -> None:
    for tree, said in [
        ({}, "call: the tree has no leaves. Give a tree of floating-point arrays"),
        ({"a": None}, "the tree has no leaves"),
        ({"a": 1.0}, r"leaf \['a'\] is of type float and not an array"),
        ({"f": jax.nn.relu}, r"leaf \['f'\] is of type .* such as equinox.filter\(model, equinox.is_inexact_array\)"),
        ({"n": jnp.arange(3)}, r"leaf \['n'\] has dtype int32, but only float32, .*, float64 are trained"),
        ({"k": jax.random.key(0)}, r"leaf \['k'\] has dtype key<fry>"),
        ({"d": np.zeros(3)}, r"leaf \['d'\] has dtype float64, .* cast it to float32, or set"),
    ]:
        with pytest.raises((InvalidArgumentError, DTypeMismatchError), match=said):
            TreeForm(tree, "call")


def test_tracers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"leaf .* is a tracer.* cannot be inside jax.jit"):
        jax.jit(lambda x: TreeForm(x, "call").shapes)(jnp.zeros(3))


def test_donated_leaves_are_refused() -> None:
    array = jnp.zeros(3)
    array.delete()
    with pytest.raises(InvalidArgumentError, match=r"leaf \['a'\] was deleted, because .* donate_argnums"):
        TreeForm({"a": array}, "call")


def test_trees_that_changed_are_refused() -> None:
    for tree, said in [
        ({"a": jnp.zeros(2)}, r"leaf \['b'\] is missing"),
        ({"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(1)}, r"leaf \['c'\] is new"),
        ({"a": jnp.zeros(2), "b": jnp.zeros((3, 1))}, r"leaf \['b'\] has shape \(3, 1\), expected \(3,\)"),
        (nnx.State({"a": jnp.zeros(2), "b": jnp.zeros(3)}), "the leaves are the same, but their containers are not"),
    ]:
        form = TreeForm({"a": jnp.zeros(2), "b": jnp.zeros(3)}, "call")
        with pytest.raises(InvalidArgumentError, match=said):
            form.arrays(tree, "call")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_trees_own_their_memory(dtype: str) -> None:
    source = {
        "w": np.arange(4096, dtype=np.float32),
        "s": np.float32(7.0).reshape(()),
        "e": np.zeros((0, 3), np.float32),
    }
    form = TreeForm({name: jnp.asarray(array, dtype) for name, array in source.items()}, "call")
    tree = form.tree(source)
    assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in tree.items()} == {
        name: (array.shape, dtype) for name, array in source.items()
    }
    source["w"][:] = -1.0
    assert float(tree["w"][3]) == 3.0 and float(tree["s"]) == 7.0
    again = form.arrays(tree, "call")
    jax.jit(lambda x: x + 1, donate_argnums=0)(form.tree(again)["w"]).block_until_ready()
    assert float(again["w"][3]) == 3.0, "a donated tree is not this one's memory"


def test_leaves_on_the_cpu_are_not_copied() -> None:
    array = jnp.arange(8.0)
    (view,) = TreeForm([array], "call").arrays([array], "call").values()
    assert view.ctypes.data == array.unsafe_buffer_pointer()


def test_arrays_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that JAX's CPU backend takes the copy over, which depends on its alignment."""
    form, made = TreeForm({"w": jnp.zeros((300, 400)), "b": jnp.zeros(3)}, "call"), []
    aligned = trees._aligned

    def recorded(*arguments: Any) -> Any:
        made.append(aligned(*arguments))
        return made[-1]

    monkeypatch.setattr(trees, "_aligned", recorded)
    tree = form.tree({"w": np.ones((300, 400), np.float32), "b": np.ones(3, np.float32)})
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)] == [copy.ctypes.data for copy in made]


def test_leaves_return_to_their_device() -> None:
    device = jax.devices()[0]
    form = TreeForm({"here": jax.device_put(jnp.zeros(2), device), "anywhere": jnp.zeros(2)}, "call")
    tree = form.tree({"here": np.ones(2, np.float32), "anywhere": np.ones(2, np.float32)})
    assert tree["here"].committed and tree["here"].devices() == {device}
    assert not tree["anywhere"].committed


_SHARDED = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import NamedSharding, PartitionSpec
from psdist.jax.trees import TreeForm
mesh = jax.make_mesh((2,), ("rows",))
placed = {key: NamedSharding(mesh, PartitionSpec(*axes)) for key, axes in {"split": ("rows",), "copied": ()}.items()}
tree = {key: jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), one) for key, one in placed.items()}
form = TreeForm(tree, "call")
back = form.tree(form.arrays(tree, "call"))
assert all(back[key].sharding == one and (back[key] == tree[key]).all() for key, one in placed.items())
assert back["split"].addressable_shards[1].data.shape == (1, 3)
print("placed")
"""


def test_leaves_return_to_all_their_devices() -> None:
    done = subprocess.run([sys.executable, "-c", _SHARDED], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (0, "placed\n"), done.stderr
