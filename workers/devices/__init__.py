"""What a worker can reach, who it is, and how TVM compiles for it."""
