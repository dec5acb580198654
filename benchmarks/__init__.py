"""Every claim of speed or size, measured beside the peers' formats in one run."""
