"""The data model and the file. Never imports torch or sglang."""
