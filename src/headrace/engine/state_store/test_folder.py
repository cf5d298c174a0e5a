"""Files that processes share: whole or not there, within bounds, whoever is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.state_store.folder import Folder
from headrace.errors import ConfigError

WRITER = textwrap.dedent(
    """
    import sys
    from hashlib import blake2b
    from pathlib import Path
    import numpy as np
    from headrace.engine.state_store.folder import Folder

    path, num_keys, size, limit, rounds = sys.argv[1], *map(int, sys.argv[2:])
    folder = Folder(Path(path), "c", limit)
    print("begun", flush=True)
    for turn in range(rounds):
        for number in range(num_keys):
            data = np.frombuffer(number.to_bytes(4, "little") * (size // 4), dtype=np.uint8)
            folder.write("kv", bytes([number]), blake2b(data.data).digest(), data, number)
            raw = folder.read("kv", bytes([number]))
            # Another process may have evicted it; a half is never seen.
            assert raw is None or raw[:64] == blake2b(raw[64:]).digest(), (turn, number, len(raw))
    """
)


def start(path: Path, *numbers: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WRITER, str(path), *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def put(folder: Folder, key: bytes, size: int = 100, rank: int = 0) -> None:
    folder.write("kv", key, b"", np.zeros(size, dtype=np.uint8), rank)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_is_written_is_there_until_it_is_taken_away(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c", 1000)
    assert not folder.has("kv", b"1")
    assert folder.read("kv", b"1") is None
    folder.write("kv", b"1", b"head", np.arange(3, dtype=np.uint8), 0)
    assert folder.has("kv", b"1")
    assert not folder.has("state", b"1")
    assert folder.read("kv", b"1") == b"head\x00\x01\x02"
    folder.discard("kv", b"1")
    folder.discard("kv", b"1")
    assert not folder.has("kv", b"1")


def test_other_contexts_are_seen_and_counted(tmp_path: Path) -> None:
    one, two = Folder(tmp_path, "c", 1000), Folder(tmp_path, "d", 1000)
    put(one, b"1")
    assert two.is_foreign("kv", b"1")
    assert not one.is_foreign("kv", b"1")
    two.evict()
    assert two.num_bytes == 100


def test_the_least_recently_used_make_room_ends_of_prefixes_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c", 1000)
    for number in range(9):
        put(folder, bytes([number]), rank=100 * number)
    folder.touch("kv", bytes([8]), 0)
    put(folder, b"a", size=250)
    assert folder.num_bytes <= 1000
    kept = [number for number in range(9) if folder.has("kv", bytes([number]))]
    assert kept == [*range(len(kept) - 1), 8]
    assert folder.num_evictions == 9 - len(kept) > 0


def test_unfinished_files_of_the_dead_go(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c", 1000)
    young, old = tmp_path / "c" / ".a.tmp", tmp_path / "c" / ".b.tmp"
    young.write_text("x")
    old.write_text("x")
    age(old, 3600.0)
    folder.evict()
    assert young.exists()
    assert not old.exists()


def test_a_folder_that_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        Folder(tmp_path / "file", "c", 1000)


def test_processes_that_write_the_same_pieces_see_no_halves(tmp_path: Path) -> None:
    writers = [start(tmp_path, 20, 40_000, 500_000, 30) for _ in range(3)]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    folder = Folder(tmp_path, "c", 500_000)
    assert 0 < folder.num_bytes <= 500_000
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read(
    tmp_path: Path,
) -> None:
    for _ in range(4):
        writer = start(tmp_path, 8, 8_000_000, 10**9, 10**6)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        time.sleep(0.15)  # In the middle of it, wherever that is.
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
    # Looks at each piece as it writes it again, and at the others'.
    survivor = start(tmp_path, 8, 8_000_000, 10**9, 1)
    survivor.communicate(timeout=60)
    assert survivor.returncode == 0
    for path in (tmp_path / "c").glob("*.kv"):
        assert path.stat().st_size == 8_000_064
