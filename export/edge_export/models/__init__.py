"""Small models, and those of the papers; each gives its features apart from its head."""

from edge_export.models.ccvr import CcvrCNN
from edge_export.models.cifar import CifarCNN, WideCNN
from edge_export.models.cnn import DigitsCNN, ImageCNN, make_cnn
from edge_export.models.mobilenet_v2 import MobileNetV2

__all__ = ["CcvrCNN", "CifarCNN", "DigitsCNN", "ImageCNN", "MobileNetV2", "WideCNN", "make_cnn"]
