"""jemlib: joint energy-based models, and the study of what keeps their training stable."""

__version__ = "0.1.0"
