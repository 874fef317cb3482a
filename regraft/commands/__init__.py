"""The commands of `regraft`, one module per family, beside what only one of them uses; `regraft.cli` combines them."""
