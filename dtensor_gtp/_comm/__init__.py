"""The runtime below ``gtp_shard``: weights, their schedule and their communication."""
