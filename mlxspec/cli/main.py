"""The `mlxspec` command: runs the command that is named and turns its result or its error into an exit code.

Knows commands by name and fetches each when it is called; knows no options of theirs, no engine, no MLX.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence

from mlxspec.cli import options, terminal
from mlxspec.cli.interrupt import Ended
from mlxspec.errors import CacheError, MlxspecError
from mlxspec.platform import nvidia

EXAMPLES = """\
mlxspec: speculative decoding on MLX that never changes the text.

  mlxspec                                          at a terminal: a page to chat on, with the best model on this disk
  mlxspec demo                                     watch it on the built-in model, with drafting and without
  mlxspec generate "what does os.path.join do?"    one answer from the built-in model
  mlxspec try                                      how fast a model that is on this disk already answers here
  mlxspec chat --model owner/name                  a conversation with a model from Hugging Face or a folder

`mlxspec --help` lists the commands, `mlxspec COMMAND --help` their options."""

_FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, also of the one that stdout goes to
ANSWERING = "generate", "chat", "serve"
RANK_VARIABLE = "MLX_RANK"  # mlx.launch tells each process by it which one it is

# First match counts. CacheError is a bug of ours, not of what was asked for.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CacheError, 1),
    (MlxspecError, 2),
    (KeyboardInterrupt, 130),
    (BrokenPipeError, 141),
    (BaseException, 1),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argv: the arguments, None for those of the process. An error is printed as one sentence
    on stderr, after its traceback with `--debug`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    terminal.prepare_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BaseException as error:
        return _ended(error, "--debug" in arguments)


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        from mlxspec.cli import alone

        if alone.is_wanted():
            return alone.run()
        print(EXAMPLES.replace("mlxspec ", f"{terminal.own_name()} "))
        return 0
    try:
        args = options.parse(arguments)
    except SystemExit as end:  # --help and --version
        return end.code if isinstance(end.code, int) else 0
    command = options.module_of(args.command)
    if os.environ.get(RANK_VARIABLE, "0") == "0":
        for said in args.notes:
            terminal.note(said)
    if args.command not in ANSWERING:
        return int(command.run(args))
    from mlxspec.cli import ranks

    return ranks.run(args, command.run)


def _ended(error: BaseException, debug: bool) -> int:
    if isinstance(error, (KeyboardInterrupt, Ended)):  # perhaps out of a write that nobody reads
        terminal.discard_output(*(s for s in (sys.stdout, sys.stderr) if not terminal.takes_more(s)))
    if isinstance(error, Ended):
        return 128 + error.number
    code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    if isinstance(error, BrokenPipeError):
        terminal.discard_output(sys.stdout)
        return code
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        if terminal.is_terminal(sys.stderr):
            print(file=sys.stderr)
    elif code == 2:
        terminal.complain(str(error))
    elif isinstance(error, ImportError) and (why := nvidia.explained(error)):
        terminal.complain(why)
        code = 2
    elif isinstance(error, OSError) and error.errno in _FULL:
        terminal.discard_output(sys.stdout)
        terminal.complain(
            f"The output cannot be written: {error.strerror}; free some space and run the command again."
        )
        code = 2
    else:
        hint = "" if debug else " Run it again with --debug to see where."
        terminal.complain(f"Something unexpected happened: {_described(error)}.{hint}")
    return code


def _described(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
