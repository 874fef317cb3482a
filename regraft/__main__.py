"""`python -m regraft`, and the command `regraft`."""

from __future__ import annotations

import sys

from index.garbage_collection import gc_paused


def main() -> None:
    """Import what the command needs, which takes a second, and run it."""
    try:
        with gc_paused():  # a fifth of importing
            from regraft import cli
    except KeyboardInterrupt:
        sys.exit(130)  # as a command that is interrupted
    cli.main()


if __name__ == "__main__":
    main()
