"""Invariants between the rows of one step: pure functions over the columns of a Recording."""
