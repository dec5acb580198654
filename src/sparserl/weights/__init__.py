"""Weights in memory: dtypes, regions, tensor tables, where bits lie, shards, digests."""
