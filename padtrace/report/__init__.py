"""One file per renderer; none of them decides anything."""
