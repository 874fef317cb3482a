"""`python -m regraft`, and the command `regraft`."""

from __future__ import annotations

from index.collector import collector_paused


def main() -> None:
    """Import what the command needs, and run it."""
    with collector_paused():  # a fifth of importing
        from regraft import cli
    cli.main()


if __name__ == "__main__":
    main()
