"""Tests of the schedule templates as such: what they offer, and that what they do can be replayed."""
