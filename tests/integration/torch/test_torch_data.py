"""psdist's samplers in torch's loaders, with processes that read ahead."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import psdist
from psdist.errors import InvalidArgumentError
from psdist.torch import LeasedDataLoader
from tests.support.contexts import workers
from tests.support.launched import Run

SIZE = 203
#: Trains on each sample by adding 1 to its place in the weights, so that they count how often each was used.
SCRIPT = """
import json, os, signal, sys
import numpy as np
import torch
from torch.utils.data import Dataset
import psdist
from psdist.torch import LeasedDataLoader

SIZE = 203

class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor(index)

def main():
    with psdist.init() as context:
        weights = context.client.parameters(
            "uses", {"w": np.zeros(SIZE, np.float32)}, psdist.optim.SGD(lr=1.0), psdist.ASP()
        )
        data_epochs = 10_000 if sys.argv[1] == "stopped" else 2
        leases = context.client.dataset("numbers", size=SIZE, range_size=20, data_epochs=data_epochs)
        loader = LeasedDataLoader(Numbers(), leases, 7, num_workers=2, multiprocessing_context="fork")
        for number, batch in enumerate(loader):
            gradient = np.zeros(SIZE, np.float32)
            gradient[batch.numpy()] = -1.0
            if sys.argv[1] == "killed" and (context.rank, context.client.incarnation, number) == (1, 1, 4):
                os.kill(os.getpid(), signal.SIGKILL)
            weights.push({"w": gradient})
            if number == 4:
                print("trains", flush=True)
        context.client.barrier()
        print(json.dumps(weights.pull()["w"].tolist()))

if __name__ == "__main__":
    main()
"""


def test_no_sample_is_lost_with_a_worker(tmp_path: Path) -> None:
    """Check that samples that it had read ahead are given to others. Samples that it trained on last may be used
    again."""
    status, output = Run.ended(tmp_path, SCRIPT, "killed")
    assert status == 0, output
    assert not re.search(r"\[worker \d\] (?!trains|\[)", output), "gRPC may complain of being forked"
    found: list[list[float]] = [json.loads(text) for text in re.findall(r"(\[[\d., ]+\])$", output, re.M)]
    # Samples are only added: a worker may have ended before another one was restarted, and used the remaining ones.
    counts = Counter(max(found, key=sum))
    assert min(counts) >= 2.0 and counts[2.0] > SIZE / 2


def test_the_processes_of_a_loader_live_until_a_stopped_script_has_ended(tmp_path: Path) -> None:
    """Check a script that trains until the workers have agreed on their last step.

    torch raises if its loader has lost a process, and a range that is returned then must not raise in the loader's own
    ``finally``.
    """
    with Run(tmp_path, SCRIPT, "stopped") as run:
        run.until("trains", 2)
        run.process.send_signal(signal.SIGTERM)
        status, text = run.end()
    assert status == 128 + signal.SIGTERM, text
    assert "Traceback" not in text, text


@pytest.fixture(scope="module")
def client() -> Iterator[psdist.Client]:
    with workers(1) as (context,):
        yield context.client


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
