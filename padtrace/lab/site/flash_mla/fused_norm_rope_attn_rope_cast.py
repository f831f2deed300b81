"""MegaAttention of the sgl-flash-mla wheel: imported by SGLang, never called by a lab server."""
