"""TensorFlow's ParameterServerStrategy, asynchronous. Runs in an environment of its own.

Roles: ``ps`` and ``worker`` are TensorFlow's servers (C++, gRPC); ``chief`` schedules the steps and takes the turns.
The weights and Adam's moments are sharded over the ps. A worker's step sends a gradient from its memory, applies it
with TensorFlow's fused Adam on the ps, and reads the new weights into the worker's memory. All workers step
concurrently, each at its own speed; a turn returns one time, the average of a worker's step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import tensorflow as tf

from benchmarks import turns

#: Variables on each ps. Several travel side by side.
VARIABLES_PER_SERVER = 2


def cluster(settings: turns.Settings) -> dict[str, list[str]]:
    """Return the addresses of all processes, chosen by the chief and written to a file."""
    path = turns.directory() / "cluster.json"
    if settings.role == "chief":
        count = settings.workers + settings.servers
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
        for one in sockets:
            one.close()
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"worker": addresses[: settings.workers], "ps": addresses[settings.workers :]}))
        draft.rename(path)
    while not path.exists():
        time.sleep(0.02)
    return dict(json.loads(path.read_text()))


class Training:
    """The chief's side."""

    def __init__(self, settings: turns.Settings, addresses: dict[str, list[str]]) -> None:
        self.settings = settings
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(addresses), rpc_layer="grpc"
        )
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        count = VARIABLES_PER_SERVER * settings.servers
        self.size = settings.params // count
        with self.strategy.scope():
            # Variables are placed on the ps in turn, so that each weight is beside its own moments.
            self.weights, self.means, self.squares = (
                [tf.Variable(tf.fill([self.size], value)) for _ in range(count)] for value in (1.0, 0.0, 0.0)
            )
        # Always the same tensor: the step's only work is the exchange and the update.
        dataset = self.coordinator.create_per_worker_dataset(self._gradients)
        self.gradients = iter(dataset)
        self.function = tf.function(self._step)

    def _gradients(self) -> Any:
        return tf.data.Dataset.from_tensors(tuple(tf.fill([self.size], 1e-3) for _ in self.weights)).repeat()

    def _step(self, iterator: Any) -> Any:
        updates = []
        variables = zip(self.weights, self.means, self.squares, next(iterator), strict=True)
        for weights, mean, square, gradient in variables:
            with tf.device(weights.device):
                updates.append(
                    tf.raw_ops.ResourceApplyAdam(
                        var=weights.handle, m=mean.handle, v=square.handle, beta1_power=0.9, beta2_power=0.999,
                        lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, grad=gradient,
                    )
                )  # fmt: skip
        read = []
        for weights, update in zip(self.weights, updates, strict=True):
            with tf.control_dependencies([update]):
                read.append(weights.read_value())
        # Results of a scheduled step stay in the worker's memory, so the weights have to travel there.
        return read

    def turn(self, steps: int) -> list[float]:
        """Return the average time of ``steps`` steps of each worker, twice: the first time of a turn does not count."""
        begin = time.perf_counter()
        for _ in range(steps * self.settings.workers):
            self.coordinator.schedule(self.function, args=(self.gradients,))
        self.coordinator.join()
        average = (time.perf_counter() - begin) / steps
        return [average, average]


def main() -> None:
    """Run a server of TensorFlow, or the chief, until the benchmark ends."""
    settings = turns.settings()
    addresses = cluster(settings)
    if settings.role == "chief":
        training = Training(settings, addresses)
        training.turn(1)
        turns.serve(training.turn, {"tensorflow": tf.__version__})
        os._exit(0)  # the strategy's threads wait for servers that have ended
    server = tf.distribute.Server(
        addresses, job_name=settings.role, task_index=settings.rank, protocol="grpc", start=True
    )
    turns.serve(lambda steps: [], {"target": server.target})
    os._exit(0)  # a server of TensorFlow cannot be stopped


if __name__ == "__main__":
    main()
