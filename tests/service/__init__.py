"""Tests of the room service/."""
