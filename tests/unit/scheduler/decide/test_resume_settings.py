"""The scheduler's machine and a run that resumes from a snapshot with other settings, or with the optimizer reset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist import optim
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import PsdistError, SettingsMismatchError
from psdist.snapshots.format import Manifest
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from tests.support.saved_runs import lose, rejoin, resumed, saved_run
from tests.support.snapshot_driver import SnapshotDriver, commit_of, history_of

SGD = optim.SGD(lr=0.1)
ADAM = optim.Adam()


def first_snapshot(d: SnapshotDriver) -> str:
    return d.cluster.snapshots.catalog.commits[-1].directory


def noted(d: SnapshotDriver) -> list[str]:
    """Return the log's texts about settings."""
    return [text for text in d.notes if "resumes from snapshot" in text]


def told(d: SnapshotDriver) -> list[str]:
    """Return the notices that workers got when their parameters were ready."""
    return [d.state(call).notice for call in list(d.told) if isinstance(d.state(call), ef.ParametersReady)]


def refused(d: SnapshotDriver, **settings: Any) -> PsdistError:
    """Return the refusal of a worker that creates the parameters with these settings."""
    worker, _ = d.join()
    return d.errors[d.create(worker, **settings)]


# --- other settings ---------------------------------------------------------------------------------------------------

ALLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"optimizer": optim.SGD(lr=0.5)}, "lr 0.1 -> 0.5"),
    "weight decay": ({"optimizer": optim.SGD(lr=0.1, weight_decay=0.01)}, "weight_decay 0.0 -> 0.01"),
    "schedule": (
        {"optimizer": optim.SGD(lr=0.1, schedule=optim.Cosine(100))},
        "schedule Constant() -> Cosine(total_steps=100)",
    ),
    "clipping": ({"optimizer": optim.SGD(lr=0.1, max_grad_norm=1.0)}, "max_grad_norm 0.0 -> 1.0"),
    "overrides": (
        {"optimizer": optim.SGD(lr=0.1, overrides=(optim.override("b", lr=0.2),))},
        "overrides () -> (override('b', lr=0.2))",
    ),
    "non_finite": ({"non_finite": "skip"}, "non_finite 'reject' -> 'skip'"),
    "backup workers": ({"consistency": BSP(1)}, "consistency BSP() -> BSP(backup_workers=1)"),
    "SSP": ({"consistency": SSP(2)}, "consistency BSP() -> SSP(staleness=2)"),
    "ASP": ({"consistency": ASP("inverse")}, "consistency BSP() -> ASP(staleness_lr='inverse')"),
}


def test_other_settings_hold_from_the_snapshot_on_and_are_announced() -> None:
    for case in ALLOWED:
        settings, text = ALLOWED[case]
        before = saved_run(7, workers=2)
        d = resumed(before, workers_min=2)
        d.begin(2, 2, **settings)
        entry, spec = d.entry(), d.entry().spec
        assert spec.slice_elements == before.entry().spec.slice_elements
        for name, value in settings.items():
            assert getattr(spec, name) == value
        assert entry.restore is not None and not entry.restore.weights_only and entry.state_since == 0
        d.go_on()
        notice = f"'mlp' resumes from snapshot {first_snapshot(d)} with other settings: {text}"
        assert d.entry().ready and noted(d) == [notice] and told(d) == [notice] * 2
        d.train(9)
        d.saved(d.save())
        (state,) = d.cluster.snapshots.catalog.newest.manifest.parameters
        assert state.spec == spec


def test_a_script_that_begins_with_a_name_that_the_snapshot_lacks_is_refused() -> None:
    d = resumed(saved_run(7))
    text = str(refused(d, name="renamed"))
    assert f"resumes from snapshot {first_snapshot(d)}, which has 'mlp' and not 'renamed'" in text, text
    assert "another --run-id" in text and d.cluster.registry.all == (), "something has changed"


def test_a_name_that_the_snapshot_lacks_is_announced_where_it_comes_after_one_that_it_has() -> None:
    d = resumed(saved_run(7))
    (worker,) = d.begin()
    d.go_on()
    call = d.create(worker, name="added")
    d.ask(ev.CommitParameters, worker, "added")
    d.go_on()
    text = f"'added' is not in snapshot {first_snapshot(d)}, from which the run resumes, and starts"
    notice = d.state(call).notice
    assert notice.startswith(text) and "The snapshot has 'mlp'" in notice and notice in d.notes


def test_a_worker_that_joins_later_reads_it_too() -> None:
    d = resumed(saved_run(7, consistency=ASP()))
    d.begin(consistency=ASP(), optimizer=optim.SGD(lr=0.5))
    d.go_on()
    worker, _ = d.join()
    call = d.create(worker, consistency=ASP(), optimizer=optim.SGD(lr=0.5))
    assert "lr 0.1 -> 0.5" in d.state(call).notice
    # The settings of the run hold for all, not those of the snapshot.
    assert "optimizer.lr is 0.1" in str(refused(d, consistency=ASP()))


def test_overrides_are_those_of_the_workers() -> None:
    d = resumed(saved_run(7))
    d.begin(optimizer=optim.SGD(lr=0.1, overrides=(optim.override("b", lr=0.0),)))
    assert [(r.start, r.stop, r.group) for r in d.entry().ranges] == [(10000, 10100, 1)]


@pytest.mark.parametrize("consistency", [SSP(1), ASP()])
def test_steps_begin_where_all_slices_are_at_one_version(consistency: Any) -> None:
    d = resumed(saved_run(7, consistency=consistency))
    d.begin()
    d.go_on()
    assert d.entry().spec.consistency == BSP() and [m.first_step for m in d.entry().members] == [7]
    d.train(9)
    assert d.saved(d.save()).steps == {"mlp": 9}


def uneven(d: SnapshotDriver) -> SnapshotDriver:
    """A scheduler that finds the snapshot of ``d`` with a slice that is behind the others."""
    history = history_of(d)
    (state,) = history.newest.manifest.parameters
    first = state.shards[0]
    shards = (replace(first, versions=(first.versions[0] - 2, *first.versions[1:])), *state.shards[1:])
    manifest = replace(history.newest.manifest, parameters=(replace(state, shards=shards),))
    found = sn.CommitFound(commit_of(manifest, 1), manifest)
    return SnapshotDriver(None, d.now, history=replace(history, commits=(found.commit,), newest=found))


def test_slices_at_several_versions_are_at_no_step() -> None:
    d = uneven(saved_run(7, consistency=ASP()))
    d.join("server")
    error = refused(d)
    assert isinstance(error, SettingsMismatchError)
    assert "slices are at versions 5 to 7, while BSP has all of them at one step" in error.message
    d.create(d.cluster.members.workers[0], consistency=SSP(3))
    d.go_on()
    assert d.entry().ready


# --- the optimizer's state --------------------------------------------------------------------------------------------

NEEDING: dict[str, tuple[optim.Optimizer, optim.Optimizer, str]] = {
    "kind": (SGD, ADAM, "optimizer SGD(lr=0.1) -> Adam()"),
    "same arrays": (ADAM, optim.AdamW(), "optimizer Adam() -> AdamW()"),
    "momentum": (SGD, optim.SGD(lr=0.2, momentum=0.9), "momentum 0.0 -> 0.9"),
    "no momentum": (optim.RMSprop(momentum=0.9), optim.RMSprop(), "momentum 0.9 -> 0.0"),
    "centered": (optim.RMSprop(), optim.RMSprop(centered=True), "centered False -> True"),
    "accumulator": (
        optim.Adagrad(),
        optim.Adagrad(initial_accumulator_value=0.5),
        "initial_accumulator_value 0.0 -> 0.5",
    ),
}


def test_what_the_state_is_of_no_use_with_needs_a_reset() -> None:
    for case in NEEDING:
        old, new, text = NEEDING[case]
        d = resumed(saved_run(7, optimizer=old))
        d.join("server")
        error = refused(d, optimizer=new)
        assert isinstance(error, SettingsMismatchError)
        assert f"'mlp' as snapshot {first_snapshot(d)} has it: {text}. " in error.message
        assert "reset_optimizer=True to client.parameters(), or to DistributedOptimizer" in error.message
        assert "keeps the snapshot's weights" in error.message and "another --run-id" in error.message
        assert d.map.parameters == () and d.cluster.registry.all == ()
        (worker,) = (member for member in d.cluster.members.workers)
        call = d.create(worker, optimizer=new, reset_optimizer=True)
        entry = d.entry()
        assert entry.restore is not None and entry.restore.weights_only
        assert (entry.state_since, entry.members[0].first_step, entry.spec.optimizer) == (7, 7, new)
        d.go_on()
        assert text in d.state(call).notice
        assert d.state(call).notice.endswith(", and the optimizer's state is reset (reset_optimizer=True)")
        assert noted(d) == [d.state(call).notice]


def test_a_reset_may_be_all_that_is_wanted() -> None:
    d = resumed(saved_run(7, optimizer=ADAM))
    d.begin(optimizer=ADAM, reset_optimizer=True)
    assert d.entry().state_since == 7 and d.entry().restore.weights_only
    reset = "and the optimizer's state is reset (reset_optimizer=True)"
    assert noted(d) == [f"'mlp' resumes from snapshot {first_snapshot(d)}, {reset}"]


def test_without_a_snapshot_a_reset_does_nothing() -> None:
    d = SnapshotDriver()
    d.begin(optimizer=ADAM, reset_optimizer=True)
    assert d.entry().ready and d.entry().restore is None and d.entry().state_since == 0
    assert noted(d) == [] and told(d) == [""]


def test_parameters_that_are_not_in_the_snapshot_are_not_reset() -> None:
    d = resumed(saved_run(7))
    (worker,) = d.begin()
    d.create(worker, name="new", optimizer=ADAM, reset_optimizer=True)
    d.ask(ev.CommitParameters, worker, "new")
    assert d.entry("new").ready and d.entry("new").state_since == 0 and noted(d) == []


@pytest.mark.parametrize("first", [False, True])
def test_all_workers_agree_on_a_reset(first: bool) -> None:
    d = resumed(saved_run(7, optimizer=ADAM), workers_min=2)
    d.join("server")
    worker, other = d.join()[0], d.join()[0]
    call = d.create(worker, optimizer=ADAM, reset_optimizer=first)
    wrong = d.create(other, optimizer=ADAM, reset_optimizer=not first)
    text = f"'mlp' as worker-0 (rank 0) creates it: reset_optimizer is {not first}, not {first}; give the same on every"
    with pytest.raises(SettingsMismatchError) as error:
        raise d.errors[wrong]
    assert text in error.value.message
    d.create(other, optimizer=ADAM, reset_optimizer=first)
    d.go_on()
    assert isinstance(d.state(call), ef.ParametersReady) and d.entry().state_since == (7 if first else 0)
    error_of_joiner = refused(d, optimizer=ADAM, reset_optimizer=not first)
    assert "as it exists: reset_optimizer is" in error_of_joiner.message


def test_asynchronous_slices_count_from_the_lowest_version() -> None:
    """So that none has counted fewer updates than its state has, as if it were further back."""
    d = uneven(saved_run(7, consistency=ASP(), optimizer=ADAM))
    d.begin(consistency=ASP(), optimizer=ADAM, reset_optimizer=True)
    assert d.entry().state_since == 5


def test_what_went_on_otherwise_is_saved_though_nothing_was_trained() -> None:
    """A run that resumes from there must find the settings that were in force, and the state as it was."""
    for settings in [
        {"optimizer": optim.Adam(lr=0.5)},
        {"optimizer": ADAM, "reset_optimizer": True},
        {"optimizer": ADAM},
    ]:
        for waits in [False, True]:
            d = resumed(saved_run(7, optimizer=ADAM))
            (worker,) = d.begin(**settings)
            d.go_on()
            d.versions["mlp"] = 7
            saved = d.state(d.save(worker, mlp=7) if waits else d.save())
            assert saved.unchanged == (settings == {"optimizer": ADAM}) and saved.committed.steps == {"mlp": 7}


@pytest.mark.parametrize("after", [BSP(), ASP()])
def test_steps_of_one_mode_are_not_taken_for_pushes_of_the_other(after: Any) -> None:
    """A worker's seventh push of its own, and the seventh step of all, are not the same."""
    before = ASP() if after == BSP() else BSP()
    d = resumed(saved_run(7, consistency=before))
    (worker,) = d.begin(consistency=after)
    d.go_on()
    d.versions["mlp"] = 14
    d.beat_versions()
    saved = d.state(d.save(worker, mlp=14 if after == BSP() else 7))
    assert isinstance(saved, sn.Saved) and not saved.unchanged and saved.committed.steps == {"mlp": 14}


# --- later snapshots, and going back ----------------------------------------------------------------------------------


def reset_run() -> SnapshotDriver:
    """SGD was trained to step 7; Adam continues from there, to step 9."""
    d = resumed(saved_run(7), workers_min=1)
    d.begin(optimizer=ADAM, reset_optimizer=True)
    d.go_on()
    d.train(9)
    return d


def go_back(d: SnapshotDriver, **settings: Any) -> None:
    """A server is lost; the run is where it was saved last."""
    lose(d, "server-1")
    d.join("server", member_id="server-1")
    rejoin(d, **settings)


def test_a_run_that_goes_back_to_before_the_reset_resets_again() -> None:
    d = reset_run()
    go_back(d, optimizer=ADAM, reset_optimizer=True)
    entry = d.entry()
    assert entry.generation == 1 and entry.members[0].first_step == 7
    assert entry.spec.optimizer == ADAM and entry.state_since == 7
    assert entry.restore is not None and entry.restore.weights_only
    assert len(noted(d)) == 2 and told(d)[-1] == noted(d)[0]


def test_a_run_that_goes_back_to_after_the_reset_does_not() -> None:
    d = reset_run()
    d.saved(d.save())
    d.train(12)
    go_back(d, optimizer=ADAM, reset_optimizer=True)
    entry = d.entry()
    assert entry.members[0].first_step == 9 and entry.state_since == 7
    assert entry.restore is not None and not entry.restore.weights_only
    assert len(noted(d)) == 1 and told(d)[-1] == ""


def test_a_run_that_goes_back_keeps_its_settings() -> None:
    d = resumed(saved_run(7))
    d.begin(optimizer=optim.SGD(lr=0.5))
    d.go_on()
    d.train(9)
    go_back(d, optimizer=optim.SGD(lr=0.5))
    assert d.entry().spec.optimizer == optim.SGD(lr=0.5) and d.entry().generation == 1
    assert len(noted(d)) == 2 and "lr 0.1 -> 0.5" in told(d)[-1]


def test_what_began_without_a_snapshot_is_not_reset_when_the_run_goes_back() -> None:
    d = SnapshotDriver(servers_min=2)
    d.begin(optimizer=ADAM, reset_optimizer=True)
    d.train(7)
    d.saved(d.save())
    go_back(d, optimizer=ADAM, reset_optimizer=True)
    entry = d.entry()
    assert entry.generation == 1 and entry.state_since == 0
    assert entry.restore is not None and not entry.restore.weights_only


def test_a_run_that_goes_back_beyond_its_beginning_resets_there() -> None:
    """Its base cannot be loaded, and the one before was taken by a run that was also to reset."""
    before = resumed(saved_run(3, optimizer=ADAM))
    before.begin(optimizer=ADAM, reset_optimizer=True)
    before.go_on()
    before.train(7)
    before.saved(before.save())
    older = history_of(before)
    before.train(9)
    before.saved(before.save())
    d = SnapshotDriver(None, before.now, history=history_of(before))
    d.loading = False
    d.begin(optimizer=ADAM, reset_optimizer=True)
    assert d.entry().state_since == 9
    entry, session = d.entry(), d.cluster.members.sessions.call_of(d.entry().primaries[0])
    d.history = replace(history_of(before), newest=older.newest)
    d.on(sn.LoadFailed(session, "mlp", 0, entry.restore, "it is not what was written"))
    d.go_on()
    d.loading = True
    rejoin(d, optimizer=ADAM, reset_optimizer=True)
    assert d.entry().members[0].first_step == 7 and d.entry().state_since == 7
    assert d.entry().restore is not None and d.entry().restore.weights_only


def test_the_next_run_goes_on_with_the_state_or_resets_it_again() -> None:
    before = reset_run()
    before.saved(before.save())
    for reset, since in ((False, 7), (True, 9)):
        d = resumed(before)
        d.begin(optimizer=ADAM, reset_optimizer=reset)
        assert d.entry().state_since == since and d.entry().restore.weights_only == reset
        d.go_on()
        d.train(12)
        d.saved(d.save())
        manifest = d.cluster.snapshots.catalog.newest.manifest
        assert manifest.parameters[0].state_since == since
        assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest and manifest.format == 2


def test_a_scheduler_that_is_started_again_knows_what_was_reset() -> None:
    """It has its store: to go back to before the reset is another thing than to go back to after it."""
    for saves in (False, True):
        d = reset_run()
        if saves:
            d.saved(d.save())
        lose(d, "server-1")
        newest = d.cluster.snapshots.catalog.newest
        again = SnapshotDriver(d.stored, d.now, history=replace(history_of(d), base=newest), servers_min=2)
        again.open(d.cluster.members.servers[0])
        again.join("server")
        rejoin(again, optimizer=ADAM, reset_optimizer=True)
        entry = again.entry()
        assert entry.ready and entry.state_since == 7 and entry.generation == 1
        assert entry.restore is not None and entry.restore.weights_only == (not saves)


def test_another_optimizer_still_in_the_same_run_is_reset_too() -> None:
    """The snapshot is from after a reset, but its state is of no use for what comes now."""
    d = reset_run()
    d.saved(d.save())
    go_back(d, optimizer=optim.Lion(), reset_optimizer=True)
    assert d.entry().state_since == 9 and d.entry().restore.weights_only


def test_the_state_stays_reset_for_backups_that_take_over() -> None:
    d = resumed(saved_run(7), replicas=2, servers_min=2)
    d.begin(optimizer=ADAM, reset_optimizer=True)
    d.go_on()
    d.fill()
    assert d.entry().ready and d.entry().state_since == 7
    lose(d, "server-1")
    assert d.entry().ready and d.entry().state_since == 7 and d.entry().generation == 0


def test_who_asked_before_the_snapshot_was_known_is_refused_when_it_is() -> None:
    before = saved_run(7)
    d = resumed(before)
    d.join("server")
    again = SnapshotDriver(d.stored, d.now, history=None)
    again.history = replace(history_of(before), base=history_of(before).newest)
    again.storing = False
    again.open(d.cluster.members.servers[0])
    worker, _ = again.join()
    call = again.create(worker, optimizer=ADAM)
    assert again.state(call).waiting_for == "for the storage to be read"
    again.storing = True
    again.go_on()
    assert isinstance(again.errors[call], SettingsMismatchError) and again.cluster.registry.all == ()
    call = again.create(worker, optimizer=ADAM, reset_optimizer=True)
    again.go_on()
    assert again.state(call).first_step == 7 and "optimizer SGD(lr=0.1) -> Adam()" in again.state(call).notice
