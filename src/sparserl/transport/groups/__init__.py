"""Process groups: buckets by broadcast, short notes through the group's store, heartbeats, and a gather for writers."""
