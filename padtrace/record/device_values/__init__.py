"""Tiers `meta` and `full`: the values of device tensors, kept beside the ring."""
