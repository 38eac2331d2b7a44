"""Dimension-reduced training: snapshots of weights, their principal components, and steps in that subspace."""

from mpkit.boost.dim_reduce.descent import DimReduce, DimReduceSGD, LineSearch
from mpkit.boost.dim_reduce.pca import pca_matrix, prepare_pca, read_pca_rows, row_block, write_pca_files
from mpkit.boost.dim_reduce.snapshots import WeightSnapshots, read_snapshots

__all__ = [
    "DimReduce",
    "DimReduceSGD",
    "LineSearch",
    "WeightSnapshots",
    "pca_matrix",
    "prepare_pca",
    "read_pca_rows",
    "read_snapshots",
    "row_block",
    "write_pca_files",
]
