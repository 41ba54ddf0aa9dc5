"""Small models, seeded: the same seed gives the same weights."""

from edge_export.models.cnn import DigitsCNN, ImageCNN, make_cnn

__all__ = ["DigitsCNN", "ImageCNN", "make_cnn"]
