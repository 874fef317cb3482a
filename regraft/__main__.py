"""`python -m regraft`, and the command `regraft`."""

from __future__ import annotations

import sys

from index.garbage_collection import gc_paused


def main() -> None:
    """Import the command, which takes a second, and run it."""
    try:
        with gc_paused():  # saves a fifth of the import time
            from regraft import cli
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as usual for shells
    cli.main()


if __name__ == "__main__":
    main()
