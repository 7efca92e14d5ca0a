"""The warning about workers with equal gradients: said once, to the lowest rank, with the ranks and the remedy."""

from __future__ import annotations

from psdist_scheduler.decide.cluster_events import EqualContributions
from psdist_scheduler.decide.effects import Notice
from tests.support.replicated_run import Run


def report(run: Run, *ranks: int, parameters: str = "mlp") -> None:
    session = next(iter(run.sessions.values()))
    ids = tuple(run.workers[rank].member_id for rank in ranks)
    run.d.on(EqualContributions(session, parameters, ids, 2))


def notices(run: Run) -> list[tuple[int, str]]:
    """Return the notices that workers got, with their ranks."""
    told = [(rank, run.d.told[session]) for rank, session in enumerate(run.beats)]
    return [(rank, value.text) for rank, values in told for value in values if isinstance(value, Notice)]


def test_the_lowest_rank_is_told_the_ranks_and_the_remedy_once() -> None:
    run = Run(workers=3)
    epoch = run.d.map.epoch
    report(run, 2, 1)
    report(run, 2, 1)
    ((rank, text),) = notices(run)
    assert rank == 1 and "ranks 1 and 2 push the same gradients of 'mlp'" in text and "DistributedSampler" in text
    assert any(text in note for note in run.d.notes), "the scheduler's log and psdist status show it, too"
    assert run.d.map.epoch == epoch


def test_a_report_about_workers_that_left_or_unknown_parameters_is_ignored() -> None:
    run = Run(workers=2)
    report(run, 0)
    report(run, 0, 1, parameters="other")
    assert not notices(run)


def test_workers_that_push_the_mean_are_not_warned() -> None:
    run = Run(workers=2)
    for worker in run.workers:
        run.d.create(worker, name="mlp/means", slice_elements=400)
    report(run, 0, 1)
    assert not notices(run)
