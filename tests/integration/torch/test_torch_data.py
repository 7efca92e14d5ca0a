"""psdist's samplers in torch's loaders, with processes that read ahead."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import psdist
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.torch import LeasedDataLoader
from tests.support.launched import Run

SIZE = 203
#: Trains on each sample by adding 1 to its place in the weights, so that they count how often each was used.
SCRIPT = """
import json, os, signal, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
import psdist
from psdist.torch import LeasedDataLoader

SIZE = 203

class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor(index)

def main():
    kind, start_method, end = sys.argv[1:4]
    with psdist.init() as context:
        weights = context.client.parameters(
            "uses", {"w": np.zeros(SIZE, np.float32)}, psdist.optim.SGD(lr=1.0), psdist.ASP()
        )
        options = dict(num_workers=2, multiprocessing_context=start_method)
        if kind == "leased":
            data_epochs = 10_000 if end == "stopped" else 2
            leases = context.client.dataset("numbers", size=SIZE, range_size=20, data_epochs=data_epochs)
            loader = LeasedDataLoader(Numbers(), leases, 7, **options)
        else:
            loader = DataLoader(Numbers(), 7, sampler=psdist.data.DistributedSampler(SIZE, drop_last=True), **options)
        for number, batch in enumerate(loader):
            gradient = np.zeros(SIZE, np.float32)
            gradient[batch.numpy()] = -1.0
            if end == "killed" and (context.rank, context.client.incarnation, number) == (1, 1, 4):
                os.kill(os.getpid(), signal.SIGKILL)
            weights.push({"w": gradient})
            if number == 4:
                print("trains", flush=True)
        context.client.barrier()
        print(json.dumps(weights.pull()["w"].tolist()))

if __name__ == "__main__":
    main()
"""


def uses(tmp_path: Path, kind: str, start_method: str, end: str = "well", *options: str) -> list[float]:
    """Return how often each sample was trained on by two workers."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", *options, str(script),
         kind, start_method, end],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "[worker" not in done.stderr, "gRPC may complain of being forked"
    found: list[list[float]] = [json.loads(text) for text in re.findall(r"(\[[\d., ]+\])$", done.stdout, re.M)]
    assert found, done.stdout
    # Samples are only added: a worker may have ended before another one was restarted, and used the remaining ones.
    return max(found, key=sum)


@pytest.mark.long  # The next test has more; test_data_service counts the samples of workers that live.
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_leased_batches_use_every_sample_once(tmp_path: Path, start_method: str) -> None:
    assert uses(tmp_path, "leased", start_method) == [2.0] * SIZE


def test_no_sample_is_lost_with_a_worker(tmp_path: Path) -> None:
    """Check that samples that it had read ahead are given to others. Samples that it trained on last may be used
    again."""
    counts = Counter(uses(tmp_path, "leased", "fork", "killed"))
    assert min(counts) >= 2.0 and counts[2.0] > SIZE / 2


def test_the_processes_of_a_loader_live_until_a_stopped_script_has_ended(tmp_path: Path) -> None:
    """Check a script that trains until the workers have agreed on their last step.

    torch raises if its loader has lost a process, and a range that is returned then must not raise in the loader's own
    ``finally``.
    """
    run = Run(tmp_path, SCRIPT, "leased", "fork", "stopped")
    try:
        run.until("trains", 2)
        run.process.send_signal(signal.SIGTERM)
        status, text = run.end()
    finally:
        run.stop()
    assert status == 128 + signal.SIGTERM, text
    assert "Traceback" not in text, text


@pytest.mark.long
def test_a_sampler_for_a_fixed_world(tmp_path: Path) -> None:
    counts = Counter(uses(tmp_path, "sampler", "fork"))
    assert counts == {1.0: SIZE - 1, 0.0: 1}, "202 samples are 101 for each worker"


@pytest.fixture(scope="module")
def client() -> Iterator[psdist.Client]:
    cluster = EmbeddedCluster(servers=1)
    with psdist.Client(cluster.address, cluster.token) as client:
        yield client
    cluster.close()


def loader(client: psdist.Client, name: str, batch_size: int = 4, **options: Any) -> LeasedDataLoader:
    data = TensorDataset(torch.arange(20))
    return LeasedDataLoader(data, client.dataset(name, size=20, range_size=8, data_epochs=1), batch_size, **options)


def test_a_loop_that_ends_early_gives_back_what_it_did_not_use(client: psdist.Client) -> None:
    name = "early"
    for number, (batch,) in enumerate(loader(client, name)):
        assert len(batch) == 4
        if number == 2:  # the first of the second range
            break
    rest = [sample for (batch,) in loader(client, name) for sample in batch.tolist()]
    assert len(rest) == len(set(rest)) == 12
    assert list(loader(client, name)) == []


def test_a_range_whose_batches_were_used_in_part_counts_as_repeated(client: psdist.Client) -> None:
    name = "in-part"
    for number, _ in enumerate(loader(client, name, num_workers=1, prefetch_factor=4)):
        if number == 3:  # the second of the second range
            break
    assert sum(len(batch) for (batch,) in loader(client, name)) == 12
    assert client.dataset(name, size=20, range_size=8, data_epochs=1).repeated == 1


def test_it_reads_ahead_without_reporting(client: psdist.Client) -> None:
    """Check that with processes all ranges are held together, and only those whose samples were used are done."""
    leases = client.dataset("ahead", size=20, range_size=2, data_epochs=1)
    batches = iter(LeasedDataLoader(TensorDataset(torch.arange(20)), leases, 1, num_workers=2, prefetch_factor=3))
    for _ in range(4):
        next(batches)
    assert sum(count for _, count in leases.position().done) == 1
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert sum(count for _, count in leases.position().done) == 1


def test_options_that_do_not_fit_are_refused(client: psdist.Client) -> None:
    for options, said in [
        ({"shuffle": True}, r"shuffle= does not apply to a LeasedDataLoader"),
        ({"sampler": [1, 2]}, "sampler= does not apply"),
        ({"drop_last": True}, "drop_last= does not apply"),
        ({"in_order": False}, "in_order=False is not supported"),
        ({"batch_size": 0}, "batch_size=0 is out of range"),
        ({"num_workers": 40, "prefetch_factor": 4}, "read 160 batches ahead, which are 82 ranges of 8 samples"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            loader(client, "refused", **options)


def test_the_sizes_must_agree(client: psdist.Client) -> None:
    leases = client.dataset("sizes", size=20, range_size=8)
    with pytest.raises(InvalidArgumentError, match=r"the data set has 3 samples, but 'sizes' was made with size=20"):
        LeasedDataLoader(TensorDataset(torch.arange(3)), leases)


def test_a_loader_takes_the_sampler_of_a_fixed_world() -> None:
    sampler = psdist.data.DistributedSampler(10, num_replicas=2, rank=1, shuffle=False)
    batches = DataLoader(TensorDataset(torch.arange(10)), 3, sampler=sampler)
    assert [batch.tolist() for (batch,) in batches] == [[1, 3, 5], [7, 9]]
