"""Experiments and measurements that nobody needs to use or change the library."""
