"""Command-line tools: python -m collx COMMAND"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Maps a command to the module whose main(arguments) runs it and returns the exit status.
COMMANDS = {
    "bench": "collx._bench.main",
    "doctor": "collx._doctor.main",
    "tune": "collx._tune.command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m collx",
        description="Tools of collx.",
        epilog="python -m collx COMMAND --help describes a command.",
    )
    parser.add_argument("command", choices=COMMANDS, metavar=f"{{{','.join(COMMANDS)}}}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    given = parser.parse_args(arguments)
    command = importlib.import_module(COMMANDS[given.command])
    return int(command.main(given.arguments))


if __name__ == "__main__":
    sys.exit(main())
