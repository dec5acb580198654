"""Process groups: frames by broadcast, heartbeats, a few bytes from every rank to every other."""
