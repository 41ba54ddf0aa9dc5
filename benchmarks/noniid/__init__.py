"""The parts of ``benchmarks/noniid.py``."""
