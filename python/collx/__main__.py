"""Command-line tools: python -m collx COMMAND"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from collx import _launch
from collx._version import VERSION

# Maps a command to the module whose main(arguments) runs it and returns the exit status, and to its
# line in the help.
COMMANDS = {
    "bench": ("collx._bench.main", "measures the operators of collx and of other libraries"),
    "doctor": ("collx._doctor.main", "reports whether collx works on this machine"),
    "tune": ("collx._tune.main", "measures the algorithms, and writes a tuning table"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m collx",
        description="Tools of collx.",
        epilog="commands:\n"
        + "".join(f"  {name:8}{line}\n" for name, (_, line) in COMMANDS.items())
        + "\npython -m collx COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"collx {VERSION}")
    parser.add_argument("command", choices=COMMANDS, metavar=f"{{{','.join(COMMANDS)}}}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    given = parser.parse_args(arguments)
    command = importlib.import_module(COMMANDS[given.command][0])
    try:
        return _launch.status(command.main, given.arguments)
    except KeyboardInterrupt:
        # Python ends the ranks, and then itself by the signal. A traceback says nothing more.
        sys.excepthook = lambda *_: None
        raise


if __name__ == "__main__":
    sys.exit(main())
