"""A real SGLang server on a CPU, small enough for a laptop.

Outside the server: `padtrace.lab.environment` (what the server is started with) and
`padtrace.lab.launcher` (the process). Inside: `padtrace.lab.plugin` and `padtrace.lab.standins`,
reached through SGLang's plugin group and inert unless PADTRACE_LAB=1. `site/` holds stub packages
that reach a path only through the launcher; `models/` two tiny models with dummy weights.

Only leaf kernels are replaced. Whatever pads, plans or schedules is SGLang's own code.
"""
