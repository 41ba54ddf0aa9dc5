"""The parts of ``benchmarks/train_step.py``."""
