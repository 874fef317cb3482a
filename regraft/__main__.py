"""`python -m regraft` is the `regraft` command."""

from regraft.cli import main

main()
