"""The graph passes between import and search, named and versioned: their name is part of every key."""
