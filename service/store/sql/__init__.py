"""Statements that differ by database: lists of keys, the server's clock, conditions on partitions."""
