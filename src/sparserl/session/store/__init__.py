"""Sessions over a store: one publisher or several ranks, any number of subscribers."""
