"""`python -m padtrace`."""

import sys

# With -m the folder it is called in comes first, where a file may lie that is called like a module.
if not sys.flags.safe_path:
    del sys.path[0]

from padtrace.cli import main

main()
