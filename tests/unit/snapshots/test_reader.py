"""Reading committed snapshots: only written values are returned, and every damage is reported with its file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from psdist.errors import SnapshotCorruptError, StorageError, UnknownSnapshotError
from psdist.snapshots import format as layouts
from psdist.snapshots import reader
from psdist.snapshots.format import CommitRecord
from psdist.snapshots.reader import CommittedSnapshot, SliceReader, Unreadable
from psdist.types import Layout, TensorSpec
from tests.support.dict_storage import DictStorage, state_of, table_of, write_snapshot


async def two_snapshots() -> tuple[DictStorage, CommitRecord, CommitRecord]:
    """Return a storage with a snapshot of step 7, and one of step 8 after it."""
    storage, state = DictStorage(), state_of()
    old, _ = await write_snapshot(storage, [state], {"net": table_of(state, 1)})
    state = state_of(step=8)
    new, _ = await write_snapshot(storage, [state], {"net": table_of(state, 2)}, sequence=2, own=b"what rank 0 has")
    return storage, old, new


async def restored(storage: DictStorage, found: CommittedSnapshot) -> list[bytes]:
    """Return all bytes of the parameters "net", as a server would load them, and of the worker states."""
    state = found.manifest.state("net")
    slices = SliceReader(storage, found.manifest)
    arrays = [array.tobytes() for i in range(state.slicing.count) for array in await slices.slice(state, i)]
    own = [part for mine in found.manifest.states async for part in reader.read_state(storage, found.manifest, mine)]
    return [*arrays, *own]


async def restored_or_error(storage: DictStorage) -> tuple[str, list[bytes]]:
    """Return directory and content of the restored snapshot, skipping corrupt ones as the scheduler does."""
    without: set[str] = set()
    while True:
        found = await reader.newest(storage, without)
        try:
            return found.manifest.directory, await restored(storage, found)
        except SnapshotCorruptError:
            without.add(found.manifest.directory)


def damages(data: bytes) -> Iterator[bytes]:
    """Iterate over every flipped bit, every truncation, and an additional byte."""
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            yield bytes(changed)
    for length in range(len(data)):
        yield data[:length]
    yield data + b"\0"


async def verified(storage: DictStorage, record: CommitRecord | Unreadable) -> None:
    if isinstance(record, Unreadable):
        raise record.error
    await reader.verify(storage, await reader.load_manifest(storage, record))


def files_of(storage: DictStorage, commit: CommitRecord) -> dict[str, bytes]:
    """Return all files of one snapshot."""
    return {p: data for p, data in storage.files.items() if p == commit.path or f"/{commit.directory}/" in p}


async def test_every_flipped_bit_and_every_truncation_is_told_by_the_files_name() -> None:
    storage, _, new = await two_snapshots()
    found = CommittedSnapshot(new, await reader.load_manifest(storage, new))
    for path, data in files_of(storage, new).items():
        for damaged in damages(data):
            storage.files[path] = damaged
            if path == new.path:
                record = (await reader.commits(storage))[0]
                assert isinstance(record, Unreadable)
                assert path in record.error.message and isinstance(record.error, SnapshotCorruptError)
            elif path.endswith("manifest.json"):
                with pytest.raises(SnapshotCorruptError, match=re.escape(path)):
                    await reader.load_manifest(storage, new)
            else:
                with pytest.raises(SnapshotCorruptError, match=re.escape(path)):
                    await reader.verify(storage, found.manifest)
                with pytest.raises(SnapshotCorruptError, match=re.escape(path)):
                    await reader.check_files(storage, found.manifest)
                    await restored(storage, found)
        storage.files[path] = data
    assert (await restored_or_error(storage))[0] == new.directory


@pytest.mark.parametrize("every", [89, pytest.param(1, marks=pytest.mark.long)])
async def test_what_is_restored_after_any_damage_is_the_snapshot_before(every: int) -> None:
    storage, old, new = await two_snapshots()
    wanted = old.directory, await restored(storage, CommittedSnapshot(old, await reader.load_manifest(storage, old)))
    for path, data in files_of(storage, new).items():
        for damaged in list(damages(data))[::every]:
            storage.files[path] = damaged
            outcome = await restored_or_error(storage)
            assert outcome == wanted, path
            record = (await reader.commits(storage))[0]
            with pytest.raises(SnapshotCorruptError, match=re.escape(path)):
                await verified(storage, record)
        storage.files[path] = data


async def test_the_newest_is_found_and_what_was_skipped_is_said() -> None:
    storage, old, new = await two_snapshots()
    found = await reader.newest(storage)
    assert found is not None and (found.commit, found.skipped) == (new, ())
    found = await reader.newest(storage, without={new.directory})
    assert found is not None and found.commit == old and new.directory in found.skipped[0]
    storage.files[new.path] = storage.files[new.path][:-1]
    found = await reader.newest(storage)
    assert found is not None and found.commit == old
    assert len(found.skipped) == 1 and new.path in found.skipped[0]


async def test_nothing_committed_is_nothing_and_nothing_usable_is_an_error() -> None:
    assert await reader.newest(DictStorage()) is None
    storage, old, new = await two_snapshots()
    for commit in (old, new):
        del storage.files[layouts.manifest_path(commit.directory)]
    with pytest.raises(SnapshotCorruptError, match=r"none of the 2 snapshots.*missing.*start a new run"):
        await reader.newest(storage)


async def test_a_storage_that_refuses_is_no_reason_to_take_an_older_snapshot() -> None:
    storage, _, new = await two_snapshots()
    storage.fail[new.path] = StorageError("no permission")
    assert [isinstance(record, Unreadable) for record in await reader.commits(storage)] == [True, False]
    with pytest.raises(StorageError, match="no permission"):
        await reader.newest(storage)
    storage.fail = {layouts.manifest_path(new.directory): StorageError("no connection")}
    with pytest.raises(StorageError, match="no connection"):
        await reader.newest(storage)


async def test_a_newer_format_is_an_error_with_a_remedy_and_not_a_corrupt_file() -> None:
    storage, _, new = await two_snapshots()
    values = json.loads(storage.files[new.path]) | {"format": layouts.FORMAT + 1}
    del values["digest"]
    values["digest"] = layouts.digest_of(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
    storage.files[new.path] = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(StorageError, match="use the psdist that wrote it"):
        await reader.newest(storage)


async def test_records_come_newest_first_and_other_names_mean_nothing() -> None:
    storage, old, new = await two_snapshots()
    storage.files |= {
        "commits/000000000003.json.draft-00ff": b"",
        "commits/3.json": b"",
        "commits/x/000000000009.json": b"",
    }
    assert await reader.commits(storage) == [new, old]


async def test_a_record_that_is_deleted_while_they_are_listed_is_gone() -> None:
    storage, old, new = await two_snapshots()
    storage.fail[new.path] = UnknownSnapshotError("deleted")
    assert await reader.commits(storage) == [old]


async def test_a_snapshot_that_is_deleted_while_it_is_read_is_not_called_corrupt() -> None:
    storage, old, new = await two_snapshots()
    path = layouts.manifest_path(new.directory)

    class Pruning(DictStorage):
        async def read(self, wanted: str, start: int = 0, length: int | None = None) -> bytes:
            if wanted == path:
                await self.delete([new.path, path])
            return await super().read(wanted, start, length)

    pruning = Pruning()
    pruning.files = storage.files
    found = await reader.newest(pruning)
    assert found is not None and (found.commit, found.skipped) == (old, ())


async def test_a_record_under_another_number_or_of_another_snapshot_is_refused() -> None:
    storage, old, new = await two_snapshots()
    storage.files[layouts.commit_path(5)] = storage.files[new.path]
    record = (await reader.commits(storage))[0]
    assert isinstance(record, Unreadable) and record.sequence == 5 and "its number is 2" in record.error.message
    data = storage.files[layouts.manifest_path(old.directory)]
    with pytest.raises(SnapshotCorruptError, match="digest"):
        await reader.load_manifest(storage, replace(new, directory=old.directory, manifest_length=len(data)))
    with pytest.raises(SnapshotCorruptError, match=r"steps is \{'net': 8\}, and in"):
        await reader.load_manifest(storage, replace(new, steps={"net": 9}))


async def test_huge_records_are_not_read() -> None:
    storage, _, new = await two_snapshots()
    storage.files[new.path] = b" " * (2 << 20)
    record = (await reader.commits(storage))[0]
    assert isinstance(record, Unreadable) and "longer than" in record.error.message


async def test_missing_swapped_and_extra_files_are_told() -> None:
    storage, _, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    first, second, _ = (layouts.file_path(new.directory, file) for file in manifest.files)
    kept = dict(storage.files)
    del storage.files[first]
    with pytest.raises(SnapshotCorruptError, match=r"00000-of-00002.safetensors is not.*missing"):
        await reader.check_files(storage, manifest)
    with pytest.raises(SnapshotCorruptError, match="missing"):
        await restored(storage, CommittedSnapshot(new, manifest))
    storage.files = kept | {first: kept[second], second: kept[first]}
    with pytest.raises(SnapshotCorruptError, match="header"):
        await restored(storage, CommittedSnapshot(new, manifest))
    stranger = layouts.file_path(new.directory, "stranger.bin")
    storage.files = kept | {stranger: b""}
    with pytest.raises(SnapshotCorruptError, match=r"stranger.bin.*no file of this name"):
        await reader.verify(storage, manifest)
    found = await reader.newest(storage)
    assert found is not None and found.commit == new, "nobody would read it"


async def test_a_file_of_another_snapshot_with_the_same_name_is_told() -> None:
    storage, old, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    file = next(iter(manifest.files))
    storage.files[layouts.file_path(new.directory, file)] = storage.files[layouts.file_path(old.directory, file)]
    with pytest.raises(SnapshotCorruptError, match="slice 0 has another digest"):
        await restored(storage, CommittedSnapshot(new, manifest))


async def test_a_header_with_overlaps_holes_or_of_a_huge_size_is_refused() -> None:
    storage, _, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    file = next(iter(manifest.files))
    path = layouts.file_path(new.directory, file)
    data = storage.files[path]
    overlap = data.replace(b'"data_offsets":[8,16]', b'"data_offsets":[0,16]')
    huge = (1 << 40).to_bytes(8, "little") + data[8:]
    for changed in (overlap, huge):
        assert changed != data and len(changed) == len(data)
        storage.files[path] = changed
        with pytest.raises(SnapshotCorruptError, match="its header is not that of its slices"):
            await restored(storage, CommittedSnapshot(new, manifest))


async def test_a_length_that_its_slices_do_not_need_is_refused() -> None:
    storage, _, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    [state] = manifest.parameters
    shards = tuple(replace(shard, length=shard.length + 4) for shard in state.shards)
    state = replace(state, shards=shards)
    with pytest.raises(SnapshotCorruptError, match="bytes are not what its slices need"):
        await SliceReader(storage, replace(manifest, parameters=(state,))).slice(state, 0)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
async def test_slices_are_the_same_by_any_number_of_shards(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_BYTES", 40)
    layout = Layout((TensorSpec("w", (19,)),))
    state = state_of(layout=layout, state_names=("m", "v"))
    table, storage = table_of(state), DictStorage()
    _, manifest = await write_snapshot(storage, [state], {"net": table}, shards=shards)
    [state] = manifest.parameters
    slices = SliceReader(storage, manifest)
    streamed = {}
    for shard in range(shards):
        async for index, arrays in slices.slices(state, shard):
            streamed[index] = arrays
    assert sorted(streamed) == list(range(state.slicing.count))
    for index in range(state.slicing.count):
        part = slice(*state.slicing.bounds(index))
        for arrays in (streamed[index], await slices.slice(state, index)):
            np.testing.assert_array_equal(np.stack(arrays), np.stack([array[part] for array in table]))
            assert all(array.dtype == np.float32 and not array.flags.writeable for array in arrays)
    alone = await reader.SliceReader(storage, manifest).slice(state, 3)
    np.testing.assert_array_equal(alone[0], table[0][6:8])


async def test_a_header_is_read_once_for_all_slices_of_its_file() -> None:
    storage, _, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    storage.reads.clear()
    await restored(storage, CommittedSnapshot(new, manifest))
    assert len(storage.reads) == 2 + 3 + 1


async def test_verifying_tells_how_far_it_is() -> None:
    storage, _, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    told: list[tuple[int, int]] = []
    await reader.verify(storage, manifest, lambda done, total: told.append((done, total)))
    assert told[-1] == (manifest.bytes, manifest.bytes) and told == sorted(told)


async def test_the_digest_of_the_whole_file_is_compared_too() -> None:
    storage, _, new = await two_snapshots()
    manifest = await reader.load_manifest(storage, new)
    [state] = manifest.parameters
    state = replace(state, shards=(state.shards[0], replace(state.shards[1], digest="0" * 32)))
    with pytest.raises(SnapshotCorruptError, match=r"00001-of-00002.safetensors.*its digest is not"):
        await reader.verify(storage, replace(manifest, parameters=(state,)))


# --- new files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "does not have it"),
        (b"", "has 0 bytes of it"),
        (b"12345678", "has 8 bytes of it"),
        (b"0123456789", "has more than 9 bytes of it"),
        (b"123456780", "has other bytes"),
    ],
)
async def test_a_new_file_that_the_storage_lost_or_changed_is_named(
    found: bytes | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_PATIENCE", (0.0, 0.0))
    monkeypatch.setattr(reader, "BATCH_BYTES", 4)
    storage, written = DictStorage(), b"123456789"
    if found is not None:
        storage.files["a/b"] = found
    with pytest.raises(StorageError, match=rf"dict:// acknowledged a/b with 9 bytes, and {text}: check the storage"):
        await reader.confirm(storage, "a/b", len(written), xxhash.xxh3_128_digest(written))


@pytest.mark.parametrize("data", [b"", b"1234", b"123456789"])
async def test_a_file_that_is_shown_late_is_confirmed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PATIENCE", (0.0, 0.0))
    monkeypatch.setattr(reader, "BATCH_BYTES", 4)

    class Late(DictStorage):
        async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            if len(self.reads) == 2:
                self.files[path] = data
            return await super().read(path, start, length)

    storage, sizes = Late(), list[int]()
    await reader.confirm(storage, "a/b", len(data), xxhash.xxh3_128_digest(data), sizes.append)
    assert len(storage.reads) >= 3 and not sizes, "only the first reading is progress"
