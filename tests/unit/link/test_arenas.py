"""Arenas and their handover: writable and read-only parts, invalid offers, and files left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from psdist import machine
from psdist.errors import SharingUnavailableError
from psdist.link import processes
from psdist.link.arenas import GradientArena, MappedVector, Piece, WeightsArena, reason_of

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture(scope="module", autouse=True)
def collecting_is_fast() -> Iterator[None]:
    """Keep garbage collections fast. Collecting objects that other tests imported takes more than a second each
    time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no test leaves a file descriptor, a socket or a mapping behind. Those of other tests may end at any
    time."""
    gc.collect()
    before = descriptors(), sockets(), mappings()
    yield
    gc.collect()
    after = descriptors(), sockets(), mappings()
    left = [now - others for now, others in zip(after, before, strict=True)]
    assert not any(left), left


def descriptors() -> set[str]:
    """Return the descriptors of memory files, with their inodes, those received over a socket included."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{number}")
            if "memfd:" in target:
                found.add(f"{number} {target} {os.stat(f'/proc/self/fd/{number}').st_ino}")
    return found


def sockets() -> set[str]:
    return {path.name for path in processes.DIRECTORY.glob("psdist-*")}


def mappings() -> set[str]:
    """Return the lines of mapped memory files, with addresses and inodes."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:psdist" in line}


# --- arenas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_server_reads_what_the_worker_writes(dtype: str) -> None:
    mine = GradientArena.create(5000, dtype)
    theirs = GradientArena.open(os.dup(mine.fd), 5000, dtype)
    mine.flat[...] = np.arange(5000) % 7
    assert theirs.nonce == mine.nonce
    assert theirs.part(7, 21).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0] * 2
    assert theirs.flat.dtype == mine.flat.dtype and theirs.flat.dtype.name == dtype
    assert not theirs.flat.flags.writeable
    mine.detach()


def test_an_empty_vector_is_an_arena_too() -> None:
    mine = GradientArena.create(0, "float32")
    assert GradientArena.open(os.dup(mine.fd), 0, "float32").part(0, 0).size == 0


def test_the_worker_reads_weights_and_cannot_write_them() -> None:
    theirs = WeightsArena.create(3, 10)
    theirs.weights[...] = np.arange(10)
    theirs.sequence[...] = (2, 4, 6)
    mine = WeightsArena.open(os.dup(theirs.fd), 3, 10)
    assert mine.weights.tolist() == list(range(10)) and mine.sequence.tolist() == [2, 4, 6]
    assert mine.nonce == theirs.nonce
    assert not mine.weights.flags.writeable and not mine.sequence.flags.writeable
    for attack in (
        lambda: mmap.mmap(mine.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.write(mine.fd, b"x"),
        lambda: os.ftruncate(mine.fd, 0),
    ):
        with pytest.raises(OSError, match=r"Permission denied|Bad file descriptor|Invalid argument"):
            attack()
    assert mine.weights.tolist() == list(range(10))


@pytest.mark.parametrize("size", [0, 100, 1 << 20])
def test_nobody_can_change_the_size_of_an_arena(size: int) -> None:
    arena = GradientArena.create(1000, "float32")
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def offered(size: int, seals: int, content: bytes = b"", allocate: bool = True) -> int:
    """Make a memory file as a peer might offer it."""
    fd = os.memfd_create("offered", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if allocate:
        os.posix_fallocate(fd, 0, size)
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


GOOD = GradientArena.size(1000, "float32")
HEADER = b"psdist-gradients" + bytes(16)


def test_the_offers_below_are_refused_for_what_is_wrong_with_them() -> None:
    assert GradientArena.open(offered(GOOD, SEALS, HEADER), 1000, "float32").nonce == bytes(16)


def test_a_file_that_could_hurt_is_refused() -> None:
    for offer, reason in [
        (lambda: offered(GOOD, 0, HEADER), "seals"),
        (lambda: offered(GOOD, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, HEADER), "seals"),
        (lambda: offered(GOOD - 4096, SEALS, HEADER), "4096 bytes"),
        (lambda: offered(GOOD + 4096, SEALS, HEADER), "bytes"),
        (lambda: offered(GOOD, SEALS, HEADER, allocate=False), "holes"),
        (lambda: offered(GOOD, SEALS, b"psdist-weights\0\0" + bytes(16)), "is not one"),
        (lambda: os.open("/dev/null", os.O_RDWR), "Invalid argument"),
        (lambda: socket.socket(socket.AF_UNIX).detach(), "Invalid argument"),
    ]:
        with pytest.raises(SharingUnavailableError, match=reason):
            GradientArena.open(offer(), 1000, "float32")


@pytest.mark.parametrize("size", [0, 100, 1 << 20])
def test_the_server_cannot_change_the_size_of_its_arena_either(size: int) -> None:
    arena = WeightsArena.create(1, 1000)
    writable = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(writable, size)
    os.close(writable)


def test_weights_that_the_worker_could_write_are_refused() -> None:
    for seals, reason in ((SEALS, "is writable"), (0, "seals")):
        fd = offered(WeightsArena.size_of(1, 10), seals, b"psdist-weights\0\0" + bytes(16))
        with pytest.raises(SharingUnavailableError, match=reason):
            WeightsArena.open(fd, 1, 10)


def test_weights_take_the_memory_of_slices_that_are_held() -> None:
    arena = WeightsArena.create(4, 4 * 4096)
    mine = WeightsArena.open(os.dup(arena.fd), 4, 4 * 4096)

    def held() -> int:
        return os.fstat(arena.fd).st_blocks * 512 - arena.offset

    assert held() == 0
    arena.allocate([(0, 4096), (8192, 16384)])
    assert held() == 3 * 16384
    arena.weights[8192:16384] = 1.0
    arena.allocate([(0, 16384)])
    assert held() == 4 * 16384 and mine.weights[8192:].tolist() == [1.0] * 8192
    arena.give_back(8000, 12288 + 100)  # whole pages only
    assert held() == 3 * 16384 and not arena.weights[8192:12288].any() and arena.weights[12288:].all()
    arena.allocate([(8192, 12288)])
    assert held() == 4 * 16384 and not mine.weights[8192:12288].any() and mine.weights[12288:].all()


def test_where_there_is_no_room_for_all_slices_none_has_got_any(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = WeightsArena.create(4, 4 * 4096)
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if offset > arena.offset:
            raise OSError(errno.ENOSPC, "no space")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = os.fstat(arena.fd).st_blocks
    with pytest.raises(OSError, match="no space"):
        arena.allocate([(0, 4096), (8192, 16384)])
    assert os.fstat(arena.fd).st_blocks == before


def test_views_outlive_their_arena() -> None:
    mine = GradientArena.create(5000, "float32")
    theirs = GradientArena.open(os.dup(mine.fd), 5000, "float32")
    written, read = mine.flat, theirs.part(10, 20)
    written[15] = 3.0
    mine.detach()
    del mine, theirs
    gc.collect()
    written[16] = 4.0  # the file no longer receives the writes
    assert read[5] == written[15] == 3.0 and read[6] == 0.0 and written[16] == 4.0


# --- what servers lose ------------------------------------------------------------------------------------------------


def test_an_arena_that_is_shared_anew_has_its_place_and_content_and_the_old_file_keeps_its_own() -> None:
    mine = GradientArena.create(5000, "float32")
    view = mine.flat[100:200]
    view[...] = 1.0
    theirs = GradientArena.open(os.dup(mine.fd), 5000, "float32").part(100, 200)
    nonce, address = mine.nonce, mine.address
    mine.detach()
    assert not mine.shareable and view.tolist() == [1.0] * 100
    view[...] = 2.0
    mine.share()
    assert mine.shareable and mine.nonce != nonce and mine.address == address
    assert view.tolist() == [2.0] * 100
    view[...] = 3.0
    assert theirs.tolist() == [1.0] * 100
    again = GradientArena.open(os.dup(mine.fd), 5000, "float32")
    assert again.part(100, 200).tolist() == [3.0] * 100 and again.nonce == mine.nonce
    mine.share()
    assert again.nonce == mine.nonce


def test_a_detached_arena_gives_its_memory_back_too() -> None:
    mine = GradientArena.create(5000, "float32")
    mine.flat[...] = 1.0
    theirs = GradientArena.open(os.dup(mine.fd), 5000, "float32").flat
    mine.detach()
    mine.release()
    assert set(mine.flat.tolist()) == {0.0} and set(theirs.tolist()) == {1.0}
    mine.flat[:10] = 2.0
    mine.share()
    again = GradientArena.open(os.dup(mine.fd), 5000, "float32").flat
    assert again[:11].tolist() == [2.0] * 10 + [0.0]


def test_nothing_is_lost_that_is_written_while_an_arena_is_detached() -> None:
    """Check that nothing is lost while another thread writes each element once; a copy that is put in place would miss
    later writes."""
    size, parts, written = 1 << 21, 1 << 11, threading.Event()
    for _ in range(8):
        mine = GradientArena.create(size, "float32")

        def write(flat: np.ndarray = mine.flat) -> None:
            for number, part in enumerate(np.split(flat, parts), 1):
                part[...] = number
                written.set()

        thread = threading.Thread(target=write)
        thread.start()
        written.wait()
        mine.detach()
        thread.join()
        written.clear()
        assert np.array_equal(mine.flat, np.repeat(np.arange(1, parts + 1), size // parts))


def test_without_room_an_arena_stays_its_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = GradientArena.create(5000, "float32")
    mine.flat[...] = 1.0
    theirs = GradientArena.open(os.dup(mine.fd), 5000, "float32").flat
    mine.detach()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "available_memory", lambda: 0)
        with pytest.raises(OSError, match="available"):
            mine.share()
    assert not mine.shareable
    mine.flat[...] = 2.0
    assert set(theirs.tolist()) == {1.0} and set(mine.flat.tolist()) == {2.0}
    mine.share()
    assert mine.shareable and set(mine.flat.tolist()) == {2.0}


# --- stitching --------------------------------------------------------------------------------------------------------


def pieces(arenas: list[WeightsArena], sizes: list[int]) -> list[Piece]:
    """Return slices of these sizes, dealt to the arenas in turn."""
    made, start = [], 0
    for index, size in enumerate(sizes):
        made.append(Piece(start, arenas[index % len(arenas)], size))
        start += size
    return made


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_slices_of_several_servers_are_one_vector(servers: int) -> None:
    sizes = [4096, 4096, 4096, 4096, 100]
    theirs = [WeightsArena.create(5, sum(sizes)) for _ in range(servers)]
    mine = [WeightsArena.open(os.dup(arena.fd), 5, sum(sizes)) for arena in theirs]
    stitched = MappedVector(sum(sizes))
    vector = stitched.vector
    assert stitched.show(pieces(mine, sizes)) and vector.size == sum(sizes) and not vector.flags.writeable
    for number, piece in enumerate(pieces(theirs, sizes)):
        theirs[number % servers].weights[piece.start : piece.start + piece.size] = number
    assert vector.tolist() == [float(number) for number, size in enumerate(sizes) for _ in range(size)]
    del theirs, mine, stitched
    gc.collect()
    assert vector[-1] == 4.0


def test_a_slice_that_moved_is_shown_where_it_is_now() -> None:
    sizes = [4096, 4096, 100]
    first, second = WeightsArena.create(3, sum(sizes)), WeightsArena.create(3, sum(sizes))
    first.weights[...] = 1.0
    second.weights[4096:8192] = 2.0
    stitched = MappedVector(sum(sizes))
    assert stitched.show(pieces([first], sizes))
    view = stitched.vector[4000:8200]
    assert stitched.show([Piece(4096, second, 4096)])
    assert view.tolist() == [1.0] * 96 + [2.0] * 4096 + [1.0] * 8
    assert os.fstat(second.fd).st_blocks * 512 == second.offset + 4096 * 4  # Nothing else of it was read.
    # A range that moves to a server without shared memory keeps its values, even if its former memory changes.
    assert stitched.show([Piece(0, None, 4096), Piece(8192, None, 100)])
    first.give_back(0, sum(sizes))
    first.weights[...] = 5.0
    assert view.tolist() == [1.0] * 96 + [2.0] * 4096 + [1.0] * 8


def test_slices_that_do_not_begin_on_a_page_are_not_stitched() -> None:
    arenas = [WeightsArena.create(3, 2500), WeightsArena.create(3, 2500)]
    stitched = MappedVector(2500)
    assert not stitched.show(pieces(arenas, [1000, 1000, 500]))
    assert stitched.show(pieces(arenas[:1], [1000, 1000, 500]))  # One range of one file.


# --- no room ----------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from psdist.link import arenas
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for create in (lambda: arenas.GradientArena.create(1 << 20, "float32"), lambda: arenas.WeightsArena.create(1, 1 << 20)):
    try:
        create()
    except OSError as error:
        print(arenas.reason_of(error))
print(arenas.GradientArena.create(1000, "float32").shareable)
"""


def test_no_room_is_an_error_with_a_reason() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert "no room" in first and "ulimit" in first and second == first
    assert third == "True"


def test_more_than_the_machine_has_is_no_room() -> None:
    with pytest.raises(OSError, match="available") as caught:
        GradientArena.create(1 << 45, "float32")
    assert "no room" in reason_of(caught.value)


# --- handover ---------------------------------------------------------------------------------------------------------


async def test_both_sides_get_the_file_of_the_other() -> None:
    gradients, weights = GradientArena.create(10, "float32"), WeightsArena.create(1, 10)
    with processes.listening() as (name, listener):
        path = processes.DIRECTORY / name
        assert path.stat().st_mode & 0o777 == 0o600
        worker = asyncio.create_task(processes.swap_files(listener, gradients.fd))
        fd, theirs = await processes.receive_file(name)
        processes.send_file(theirs, weights.fd)
        taken, mine = await worker
    assert not path.exists()
    assert GradientArena.open(fd, 10, "float32").nonce == gradients.nonce
    assert WeightsArena.open(taken, 1, 10).nonce == weights.nonce
    with mine, theirs:  # Both ends of the connection are still open.
        mine.send(b"call")
        assert theirs.recv(9) == b"call"


async def test_only_names_of_sockets_are_connected_to() -> None:
    for name in ["", "x", "../psdist-" + "0" * 32, "psdist-" + "0" * 31, "psdist-" + "0" * 33, "psdist-" + "G" * 32]:
        with pytest.raises(SharingUnavailableError, match="is not the name"):
            await processes.receive_file(name)


async def test_a_socket_that_is_not_there_is_another_host() -> None:
    with pytest.raises(SharingUnavailableError, match="do not see the same"):
        await processes.receive_file("psdist-" + "0" * 32)


async def test_a_worker_that_hangs_up_or_gives_no_file() -> None:
    for message, reason in ((b"", "closed the connection"), (b"x", "sent no file")):
        with processes.listening() as (name, listener):

            async def answer(listener: socket.socket = listener, message: bytes = message) -> None:
                peer, _ = await asyncio.get_running_loop().sock_accept(listener)
                with peer:
                    peer.send(message)

            task = asyncio.create_task(answer())
            with pytest.raises(SharingUnavailableError, match=reason):
                await processes.receive_file(name)
            await task


async def test_a_worker_that_is_silent_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HANDOVER_SECONDS", 0.05)
    with processes.listening() as (name, _), pytest.raises(SharingUnavailableError, match="within"):
        await processes.receive_file(name)


async def test_a_server_that_hangs_up() -> None:
    arena = GradientArena.create(10, "float32")
    with processes.listening() as (name, listener):
        worker = asyncio.create_task(processes.swap_files(listener, arena.fd))
        fd, connection = await processes.receive_file(name)
        os.close(fd)
        connection.close()
        with pytest.raises(SharingUnavailableError, match="closed the connection"):
            await worker


async def test_another_users_process_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = GradientArena.create(10, "float32")
    with processes.listening() as (name, listener):
        worker = asyncio.create_task(processes.swap_files(listener, arena.fd))
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            with pytest.raises(SharingUnavailableError, match="requires the same user"):
                await processes.receive_file(name)
            with pytest.raises(SharingUnavailableError, match="requires the same user"):
                await worker


def test_no_shared_memory_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "DIRECTORY", tmp_path / "gone")
    with pytest.raises(SharingUnavailableError, match="cannot listen on a socket in"), processes.listening():
        pass
    assert processes.sweep() == 0


# --- sweeping ---------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal
from psdist.link import processes
with processes.listening() as (name, _):
    print(name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sweeping_removes_what_the_dead_left_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    dead = processes.DIRECTORY / done.stdout.strip()
    other = processes.DIRECTORY / ("psdist-" + "0" * 31)
    plain = processes.DIRECTORY / ("psdist-" + "0" * 32)
    try:
        assert dead.is_socket()
        other.touch()
        plain.touch()
        with processes.listening() as (name, listener):
            assert processes.sweep() == 1
            assert (processes.DIRECTORY / name).is_socket()
            with contextlib.suppress(BlockingIOError):  # The listener noticed nothing.
                listener.accept()
                pytest.fail("a live socket was connected to")
        assert not dead.exists() and other.exists() and plain.exists()
    finally:
        for path in (dead, other, plain):
            with suppress(FileNotFoundError):
                path.unlink()
