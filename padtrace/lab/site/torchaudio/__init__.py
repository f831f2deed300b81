"""An empty torchaudio: SGLang imports it for audio models, which the lab does not serve."""

__version__ = "0"
