"""`python -m padtrace`."""

from padtrace.cli import main

main()
