"""Reports of a held worker on its iterations."""

from __future__ import annotations

from psdist.client.core.push_sequence import PushSequence
from psdist.client.session.worker_alignment import WorkerAlignment
from psdist.consistency import BSP
from psdist.v1 import scheduler_pb2 as pb


def test_a_declared_end_is_reported_though_its_position_was_reported_before() -> None:
    reports: list[pb.AlignReport] = []
    iterations = WorkerAlignment(lambda request: reports.append(request.align), lambda: True)
    sequences = {name: PushSequence(1, BSP()) for name in "DG"}
    for name, sequence in sequences.items():
        iterations.enter(name, sequence)
    iterations.mark_boundary()
    for name in "DG":
        sequences[name].send(0)
        iterations.push_began(name)
    iterations.on_command(pb.AlignCommand(number=1, hold=True))
    assert (reports[-1].position, reports[-1].start) == (2, 0), "the iteration's last push is under way"
    iterations.mark_boundary()
    assert (reports[-1].position, reports[-1].start) == (2, 2)
