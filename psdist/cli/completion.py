"""``psdist completion``: prints a completion script for bash, zsh or fish, made from the declarations of all commands.

A script is text alone: a key press starts no Python. Values are completed for flags that take one of a few words, or a
file; what follows a script's name is left to the shell.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.cli.commands import Command, Group, Leaf
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, OneOf
from psdist.settings.programs import scheduler_line, server_line


@dataclass(frozen=True, slots=True)
class Node:
    """A program, a group or a command. path: its words. commands: those of a group, with their help."""

    path: str
    commands: tuple[tuple[str, str], ...] = ()
    line: CommandLine | None = None

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Flags of a command."""
        return self.line.flags if self.line is not None else ()

    @property
    def name(self) -> str:
        """Its path as the name of a function."""
        return "_psdist_at_" + self.path.replace(" ", "_").replace("-", "_")


def nodes() -> list[Node]:
    """Return the tree of all programs, parents first."""
    from psdist.cli import worker  # It imports the launcher.
    from psdist.cli.main import PSDIST

    lines = (scheduler_line(), server_line(), worker.command_line())
    return [*_nodes_of(PSDIST), *(Node(line.program, line=line) for line in lines)]


def _nodes_of(group: Group) -> Iterator[Node]:
    yield Node(group.program, tuple((command.usage.split()[0], command.help) for command in group.commands))
    for command in group.commands:
        chosen = command.load()
        if isinstance(chosen, Group):
            yield from _nodes_of(chosen)
        else:
            line = chosen.command_line()
            yield Node(line.program, line=line)


def choices(flag: Flag) -> tuple[str, ...]:
    """Return the words that a flag takes; empty if it takes others, too."""
    return flag.convert.choices if isinstance(flag.convert, OneOf) else ()


def takes_file(flag: Flag) -> bool:
    """Return True if a flag takes the name of a file or directory."""
    return flag.convert is Path or flag.metavar in ("FILE", "DIR", "PATH")


def _programs(tree: list[Node]) -> list[str]:
    return [node.path for node in tree if " " not in node.path]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- bash -------------------------------------------------------------------------------------------------------------

_BASH: Final = """\
# Completion of psdist for bash: psdist completion bash > ~/.local/share/bash-completion/completions/psdist

# The kind of value that a flag takes: words, "file" or "any".
_psdist_value() {
  case "$1 $2" in
@VALUES@
    *) return 1 ;;
  esac
}

_psdist() {
  local cur=${COMP_WORDS[COMP_CWORD]} path=${COMP_WORDS[0]##*/} i word value words=
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if _psdist_value "$path" "$word"; then
      ((++i == COMP_CWORD)) || continue
      [[ $value == any ]] && compopt +o default 2>/dev/null
      [[ $value == any || $value == file ]] || COMPREPLY=($(compgen -W "$value" -- "$cur"))
      return
    fi
    case $word in -*) continue ;; esac
    case "$path $word" in
      @PATHS@) path+=" $word" ;;
      *) return ;;
    esac
  done
  case $path in
@WORDS@
  esac
  if [[ $cur == -* || $value == group ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  fi
}
complete -o default -F _psdist @PROGRAMS@
"""


def bash(tree: list[Node]) -> str:
    """Return the script for bash."""
    kinds: dict[str, list[str]] = {}
    for node in tree:
        for flag in node.flags:
            if flag.convert is not None:
                kind = " ".join(choices(flag)) or ("file" if takes_file(flag) else "any")
                kinds.setdefault(kind, []).extend(_quoted(f"{node.path} {name}") for name in flag.spellings)
    values = [f"    {'|'.join(patterns)}) value={_quoted(kind)} ;;" for kind, patterns in kinds.items()]
    words = []
    for node in tree:
        names = [*(word for word, _ in node.commands), *(flag.name for flag in node.flags), "--help"]
        group = " value=group" if node.commands else " value="
        words.append(f"    {_quoted(node.path)}) words={_quoted(' '.join(names))}{group} ;;")
    parts = {
        "VALUES": "\n".join(values),
        "PATHS": "|".join(_quoted(node.path) for node in tree if " " in node.path),
        "WORDS": "\n".join(words),
        "PROGRAMS": " ".join(_programs(tree)),
    }
    return _filled(_BASH, parts)


def _filled(template: str, parts: Mapping[str, str]) -> str:
    for name, text in parts.items():
        template = template.replace(f"@{name}@", text)
    return template


# --- zsh --------------------------------------------------------------------------------------------------------------

_ZSH: Final = """\
#compdef @PROGRAMS@
# Completion of psdist for zsh: psdist completion zsh > DIRECTORY_OF_FPATH/_psdist

@FUNCTIONS@

_psdist() {
  case $service in
@CASES@
  esac
}

if [[ $funcstack[1] == _psdist ]]; then
  _psdist "$@"
else
  compdef _psdist @PROGRAMS@
fi
"""
_ZSH_GROUP: Final = """\
@NAME@() {
  local context state state_descr line
  local -a commands
  typeset -A opt_args
  commands=(
@COMMANDS@
  )
  _arguments -C '(- *)'{-h,--help}'[show the help]' '1: :->command' '*:: :->rest'
  case $state in
    command) _describe -t commands command commands ;;
    rest)
      case $words[1] in
@CASES@
      esac ;;
  esac
}
"""


def zsh(tree: list[Node]) -> str:
    """Return the script for zsh."""
    parts = {
        "FUNCTIONS": "\n".join(_zsh_group(node) if node.commands else _zsh_command(node) for node in tree),
        "CASES": "\n".join(f"    {node.path}) {node.name} ;;" for node in tree if " " not in node.path),
        "PROGRAMS": " ".join(_programs(tree)),
    }
    return _filled(_ZSH, parts)


def _zsh_group(node: Node) -> str:
    parts = {
        "NAME": node.name,
        "COMMANDS": "\n".join(f"    {_quoted(f'{word}:{text}')}" for word, text in node.commands),
        "CASES": "\n".join(f"        {word}) {Node(f'{node.path} {word}').name} ;;" for word, _ in node.commands),
    }
    return _filled(_ZSH_GROUP, parts)


def _zsh_command(node: Node) -> str:
    rows = ["'(- *)'{-h,--help}'[show the help]'"]
    for flag in node.flags:
        text = "".join(f"\\{one}" if one in "[]\\" else one for one in flag.help)
        for name in flag.spellings[: 2 if flag.short else 1]:
            row = f"{'*' if flag.repeats else ''}{name}{'=' if flag.convert and name != flag.short else ''}[{text}]"
            if flag.convert is not None:
                words = f"({' '.join(choices(flag))})" if choices(flag) else "_files" if takes_file(flag) else " "
                row += f":{flag.metavar.replace(':', chr(92) + ':')}:{words}"
            rows.append(_quoted(row))
    if node.line is not None and node.line.script:
        rows += ["'1: :_files'", "'*: :_files'"]
    return f"{node.name}() {{\n  _arguments -S \\\n    " + " \\\n    ".join(rows) + "\n}\n"


# --- fish -------------------------------------------------------------------------------------------------------------

_FISH: Final = """\
# Completion of psdist for fish: psdist completion fish > ~/.config/fish/completions/psdist.fish
set -g __psdist_paths @PATHS@

function __psdist_at
    set -l words (commandline -opc)
    set -l here (string replace -r '.*/' '' -- $words[1])
    for word in $words[2..]
        if contains -- "$here $word" $__psdist_paths
            set here "$here $word"
        end
    end
    test "$here" = "$argv"
end
"""


def fish(tree: list[Node]) -> str:
    """Return the script for fish."""
    rows = [_FISH.replace("@PATHS@", " ".join(_quoted(node.path) for node in tree if " " in node.path))]
    for node in tree:
        start = f"complete -c {node.path.split()[0]} -n '__psdist_at {node.path}'"
        rows += [f"{start} -f -a {word} -d {_fish_quoted(text)}" for word, text in node.commands]
        rows.append(f"{start} -s h -l help -d 'show the help'")
        for flag in node.flags:
            words = f"-xa {_fish_quoted(' '.join(choices(flag)))}" if choices(flag) else ""
            value = "" if flag.convert is None else words or ("-rF" if takes_file(flag) else "-x")
            short = f"-s {flag.short[1:]} " if flag.short else ""
            rows.append(f"{start} {short}-l {flag.name[2:]} {value} -d {_fish_quoted(flag.help)}")
    return "\n".join(rows) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# --- the command ------------------------------------------------------------------------------------------------------


def _command(shell: str, script: Callable[[list[Node]], str]) -> Command:
    place = {
        "bash": "~/.local/share/bash-completion/completions/psdist",
        "zsh": "a directory of fpath as _psdist",
        "fish": "~/.config/fish/completions/psdist.fish",
    }[shell]

    def line() -> CommandLine:
        return CommandLine(
            f"psdist completion {shell}",
            f"Prints the completion of all programs of psdist for {shell}. Write it to {place}.",
            (),
            epilog=" ",
        )

    def run(given: Namespace, environ: Mapping[str, str]) -> int:
        print(script(nodes()), end="")
        return OK

    return Command(shell, f"print the completion for {shell}", lambda: Leaf(line, run))


COMPLETION: Final = Group(
    "psdist completion",
    "Completion of commands and flags by the tab key.",
    (_command("bash", bash), _command("zsh", zsh), _command("fish", fish)),
    'For this shell alone: eval "$(psdist completion bash)". Each command has --help.',
)
