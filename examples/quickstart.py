"""The smallest training: fit a line through points, each worker with points of its own.

psdist run --nservers 2 --nproc-per-node 2 examples/quickstart.py
"""

import numpy as np

import psdist

SLOPE, INTERCEPT = 3.0, -1.0

with psdist.init() as context:
    line = context.client.parameters(  # creates it, or attaches if another worker was first
        "line",
        init={"slope": np.float32(0), "intercept": np.float32(0)},
        optimizer=psdist.optim.Adam(lr=0.1),
        consistency=psdist.BSP(),
    )
    values = line.pull()  # {"slope": array, "intercept": array}
    rng = np.random.default_rng(context.rank)
    while line.step < 200:  # counted by the servers: also correct after this worker missed steps
        x = rng.uniform(-1, 1, 32)
        error = values["slope"] * x + values["intercept"] - (SLOPE * x + INTERCEPT)
        gradients = {"slope": np.float32((error * x).mean()), "intercept": np.float32(error.mean())}
        values = line.push_pull(gradients)  # one step: the mean over all workers is applied on the servers
        context.report(loss=float((error**2).mean()), samples=len(x))  # shown by psdist run
    if context.rank == 0:
        print(f"y = {float(values['slope']):.2f} x {float(values['intercept']):+.2f} after {line.version} steps")
