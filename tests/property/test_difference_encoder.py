"""Difference pushes (EF21), with servers that forget, or receive a push twice or never.

The gradient that a server applies always equals the worker's estimate, and is the same as without these faults.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psdist.client.core.encoder import DifferenceEncoder, EncodedSlices
from psdist.compression import ChunkedTopK, Codec, Int2, Int8, OneBit, PerTensor, PowerSGD, RandomK, TopK
from psdist.compression.segments import check
from psdist.errors import StaleEstimateError
from psdist.types import Identity, Layout, Slicing, TensorSpec
from psdist_server.core.contributions import GradientEstimates

LAYOUT = Layout((TensorSpec("w", (23, 31)), TensorSpec("b", (31,)), TensorSpec("v", (1500,))))
SLICING = Slicing(LAYOUT.total, 300)
EVERY = range(SLICING.count)
CODECS: list[Codec] = [
    PerTensor({"v": Int8(error_feedback="ef21"), "*": codec}, min_elements=64, min_vector=64)
    for codec in (
        Int8(block=16, error_feedback="ef21"), Int2(stochastic=True, error_feedback="ef21"),
        OneBit(error_feedback="ef21"), TopK(0.05, error_feedback="ef21"),
        ChunkedTopK(2, 64, bits=2, error_feedback="ef21"), RandomK(0.2, error_feedback="ef21"),
        PowerSGD(1, error_feedback="ef21"),
    )
]  # fmt: skip


class Server:
    """Model of a server that receives difference pushes."""

    def __init__(self) -> None:
        self.estimates = GradientEstimates(SLICING)

    def take(self, push: EncodedSlices, slices: list[int], incarnation: int) -> dict[int, bytes]:
        """Return the gradients of one call's slices."""
        worker, difference, found = Identity("run", "worker-0", incarnation, 1, "p"), push.difference(slices), {}
        assert difference is not None
        for index in slices:
            payload = np.frombuffer(push.payload(index), np.uint8)
            check(payload, SLICING.size(index))
            gradient = self.estimates.add(worker, difference, index, payload)
            self.estimates.keep(worker, difference, index, gradient)
            found[index] = gradient.tobytes()
        return found


def sent(push: EncodedSlices, slices: list[int], server: Server, incarnation: int) -> dict[int, bytes]:
    """Send the slices of one route as the data path does."""
    try:
        return server.take(push, slices, incarnation)
    except StaleEstimateError:
        push.send_whole(slices)
        return server.take(push, slices, incarnation)


def gradients(push: EncodedSlices, slices: list[int]) -> dict[int, bytes]:
    """Return the worker's estimates of a push."""
    found = {index: np.empty(SLICING.size(index), np.float32) for index in slices}
    for index, out in found.items():
        push.decode_into(index, out)
    return {index: out.tobytes() for index, out in found.items()}


@given(st.data(), st.sampled_from(CODECS))
def test_servers_and_the_worker_have_the_same_gradient(data: st.DataObject, codec: Codec) -> None:
    encoder, undisturbed = (DifferenceEncoder(codec, LAYOUT, SLICING, rank=1) for _ in range(2))
    server, incarnation = Server(), 1
    for number in range(data.draw(st.integers(1, 6), "pushes")):
        flat = np.random.default_rng(number).standard_normal(LAYOUT.total).astype(np.float32)
        match data.draw(st.sampled_from(["nothing", "fail-over", "new incarnation", "resume", "rollback"]), "before"):
            case "fail-over":
                server = Server()
            case "new incarnation":
                incarnation += 1
                server.estimates.fence({"worker-0": incarnation})
            case "resume":  # A worker restarts from a snapshot, together with the servers.
                state = {name: array.copy() for name, array in encoder.state().items()}
                encoder, server, incarnation = DifferenceEncoder(codec, LAYOUT, SLICING, rank=1), Server(), 1
                encoder.restore(state)
            case "rollback":  # To its current state.
                encoder.restore({name: array.copy() for name, array in encoder.state().items()})
        push, expected = encoder.begin_push(), undisturbed.begin_push()
        valued = data.draw(st.sets(st.sampled_from(EVERY), min_size=1), "slices with values")
        calls = data.draw(st.lists(st.sets(st.sampled_from(sorted(valued)), min_size=1), max_size=4), "calls")
        assert encoder.encode(push, flat, sorted(valued)) and undisturbed.encode(expected, flat, sorted(valued))
        wanted = gradients(expected, sorted(valued))
        assert gradients(push, sorted(valued)) == wanted, "whatever happened, the gradient is the same"
        for call in calls:
            assert sent(push, sorted(call), server, incarnation) == {index: wanted[index] for index in call}
        assert server.estimates.bytes == sum(one.values.nbytes for one in server.estimates._kept.values())
        assert encoder.end_push() and undisturbed.end_push()
        state, other = encoder.state(), undisturbed.state()
        assert {name: array.tobytes() for name, array in state.items()} == {
            name: array.tobytes() for name, array in other.items()
        }


@given(st.sampled_from(CODECS))
def test_the_estimate_comes_to_a_gradient_that_stays(codec: Codec) -> None:
    encoder = DifferenceEncoder(codec, LAYOUT, SLICING, rank=0)
    flat = np.linspace(-1, 1, LAYOUT.total, dtype=np.float32)
    errors = []
    for _ in range(60):
        push = encoder.begin_push()
        encoder.encode(push, flat, EVERY)
        found = np.empty(LAYOUT.total, np.float32)
        for index in EVERY:
            push.decode_into(index, found[slice(*SLICING.bounds(index))])
        errors.append(float(np.linalg.norm(found - flat)))
        encoder.end_push()
    assert errors[0] > 0 and errors[-1] < 0.2 * errors[0]
