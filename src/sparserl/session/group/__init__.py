"""Sessions over a process group, and relays from a store into one."""
