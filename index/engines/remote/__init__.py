"""A shard in a server, and the protocol of such an engine (`base`), whichever server it is."""
