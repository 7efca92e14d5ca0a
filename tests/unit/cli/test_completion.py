"""``psdist completion``: each shell offers the commands, flags and words of the declarations."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from psdist.cli.completion import COMPLETION, bash, fish, nodes, zsh
from psdist.cli.main import PSDIST

#: A line, and what the tab key offers; the empty text offers files or nothing.
CASES = {
    "psdist ": "run",
    "psdist sn": "snapshot",
    "psdist run --nserv": "--nservers",
    "psdist config s": "show",
    "psdist snapshot li": "list",
    "psdist status --format js": "json",
    "psdist run --log-level deb": "debug",
    "psdist-server --server-": "--server-id",
    "psdist run --nproc-per-node 2 train.py --nserv": "",
    "psdist run --log-dir status --nserv": "--nservers",
}


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_every_command_is_in_every_script() -> None:
    tree = nodes()
    paths = {node.path for node in tree}
    assert {"psdist", "psdist run", "psdist config show", "psdist-scheduler", "psdist completion zsh"} <= paths
    for script in (bash(tree), zsh(tree), fish(tree)):
        assert "@" not in script.replace("$@", "").replace("[@]", "").replace("user@", ""), "a place was not filled"
        for node in tree:
            assert all(flag.name[2:] in script for flag in node.flags)


@needs("bash")
@pytest.mark.parametrize("line", CASES)
def test_bash_completes(tmp_path: Path, line: str) -> None:
    (tmp_path / "script").write_text(bash(nodes()))
    show = f'source {tmp_path}/script; COMP_WORDS=({line} ""); [[ "{line}" == *" " ]] || unset "COMP_WORDS[-1]"; '
    offered = output("bash", "-c", show + 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _psdist; echo "${COMPREPLY[@]}"')
    assert (CASES[line] in offered.split()) if CASES[line] else not offered.strip()


@needs("fish")
@pytest.mark.parametrize("line", [line for line in CASES if CASES[line]])
def test_fish_completes(tmp_path: Path, line: str) -> None:
    (tmp_path / "script").write_text(fish(nodes()))
    offered = output("fish", "--no-config", "-c", f"source {tmp_path}/script; complete -C '{line}'")
    assert CASES[line] in [row.split("\t")[0] for row in offered.splitlines()]


@needs("zsh")
def test_zsh_completes(tmp_path: Path) -> None:
    """zsh completes in its line editor only, which needs a terminal."""
    (tmp_path / "script").write_text(zsh(nodes()))
    output("zsh", "-n", str(tmp_path / "script"))
    child, terminal = pty.fork()
    if not child:
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "HOME": str(tmp_path)})
    shown, late = b"", time.monotonic() + 60

    def send(text: str, until: bytes) -> None:
        nonlocal shown
        shown = b""
        os.write(terminal, text.encode())
        while until not in shown:
            assert time.monotonic() < late, shown
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 65536)

    try:
        send(
            f"autoload -U compinit; compinit -u -D; source {tmp_path}/script; unset zle_bracketed_paste; PS1='$ '\n",
            b"$ ",
        )
        send("echo begun-$((1 + 1))\n", b"begun-2")
        for line, offered in CASES.items():
            if offered and line != "psdist ":
                send(f"{line}\t", offered.encode()[len(line.split()[-1]) :])
                send("\x15", b"")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def test_the_command_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert PSDIST.run(["completion", "bash"], {}) == 0
    assert capsys.readouterr().out == bash(nodes())
    assert [command.usage for command in COMPLETION.commands] == ["bash", "zsh", "fish"]
