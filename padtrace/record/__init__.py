"""Recording a live server: the probes and the ring inside it, the launcher outside it."""
