"""`mlxspec completion`: a script that completes commands, options and their values in bash, zsh or fish. Knows parsers and shells."""

from __future__ import annotations

import argparse

from mlxspec.cli import options, terminal
from mlxspec.cli.parser import choice, declare

SHELLS = ("bash", "zsh", "fish")
_MODELS = options.DEMO_FAMILY

_BASH = """\
# {how}
_mlxspec() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$COMP_CWORD:${{COMP_WORDS[1]}}:$before" in
    1:*) words="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ -n "$words" ] && [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -o filenames -F _mlxspec mlxspec
"""
_HOW = {
    "bash": 'to be read by bash: eval "$(mlxspec completion bash)" in ~/.bashrc',
    "zsh": 'to be read by zsh: eval "$(mlxspec completion zsh)" in ~/.zshrc, behind compinit',
    "fish": "to be read by fish: mlxspec completion fish > ~/.config/fish/completions/mlxspec.fish",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", type=choice("SHELL", SHELLS), help=", ".join(SHELLS))
    declare(parser, options.DEBUG)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = _fish() if args.shell == "fish" else _bash(_HOW[args.shell])
    terminal.say("autoload -U +X bashcompinit && bashcompinit\n" * (args.shell == "zsh") + script)
    return 0


def _options() -> dict[str, list[argparse.Action]]:
    return {command: options.parser_of(command)._actions for command in options.COMMANDS}


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Words that an option or a place may have; empty where it may be anything."""
    if action.dest in ("model", "source"):
        return _MODELS
    return tuple(getattr(action.type, "choices", ()))


def _bash(how: str) -> str:
    cases = []
    for command, actions in _options().items():
        spelled: dict[str, list[str]] = {}
        for action in (a for a in actions if a.option_strings and a.nargs is None):
            places = [f"*:{command}:{s}" for s in action.option_strings]
            spelled.setdefault(" ".join(_values(action)), []).extend(places)
        cases += [f'    {"|".join(places)}) words="{values}" ;;' for values, places in spelled.items()]
        words = [s for a in actions for s in a.option_strings if s.startswith("--")]
        words += [v for a in actions if not a.option_strings for v in _values(a)]
        cases.append(f'    *:{command}:*) words="{" ".join(words)}" ;;')
    return _BASH.format(how=how, commands=" ".join(options.COMMANDS), cases="\n".join(cases))


def _fish() -> str:
    lines = [f"# {_HOW['fish']}"]
    for command, about in options.COMMANDS.items():
        lines.append(f"complete -c mlxspec -n __fish_use_subcommand -f -a {command} -d {_quoted(about)}")
    for command, actions in _options().items():
        begin = f"complete -c mlxspec -n '__fish_seen_subcommand_from {command}'"
        for action in actions:
            names = [f"-l {s[2:]}" if s.startswith("--") else f"-s {s[1:]}" for s in action.option_strings]
            values = [f"-a {_quoted(' '.join(_values(action)))}"] if _values(action) else []
            takes = ["-r"] if names and action.nargs is None else []
            if names or values:
                told = f"-d {_quoted(action.help or '')}"
                lines.append(" ".join([begin, *names, *takes, *values, told]))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
