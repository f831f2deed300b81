"""One probe per kind of hooked function; each turns a call into one event.

A probe reads shapes and host integers only. It may raise: the hook around it switches it off.
"""
