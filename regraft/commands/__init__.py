"""The commands of `regraft`, one module per family; `regraft.cli` combines them."""
