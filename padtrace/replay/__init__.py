"""Replay: run recorded padding and planning decisions again through a real SGLang release."""
