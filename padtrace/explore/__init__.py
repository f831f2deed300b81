"""Features composed of the verbs: recordings made, swept, shrunk, exported."""
