"""One file a noun of the HTTP contract."""
