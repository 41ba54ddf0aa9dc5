"""Calibration of the classifier on virtual features (CCVR; Luo et al., arXiv 2106.05001)."""

from edge_server.calibration.ccvr import calibrate, calibrate_on
from edge_server.calibration.oracle import real_features
from edge_server.calibration.pool import Pooled, pool
from edge_server.calibration.retrain import Settings, retrain
from edge_server.calibration.virtual import virtual_features
from edge_server.calibration.wasserstein import sliced_wasserstein

__all__ = [
    "Pooled",
    "Settings",
    "calibrate",
    "calibrate_on",
    "pool",
    "real_features",
    "retrain",
    "sliced_wasserstein",
    "virtual_features",
]
