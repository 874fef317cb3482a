"""The commands of `regraft`, one module a family; `regraft.cli` puts them together."""
