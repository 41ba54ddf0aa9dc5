"""The second lowering of a bundle's programs: to one ``.pte`` that any stock ExecuTorch runs.

:mod:`~edge_export.executorch.lowering` says how; the other modules are the table of decompositions.
"""
