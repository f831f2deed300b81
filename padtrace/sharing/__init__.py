"""What leaves a server: a positive list, a second wall by shape, and the proof of a file."""
