"""Dimension-reduced training: snapshots of weights, their principal components, and steps in that subspace."""

from .components import (
    WeightSnapshots,
    pca_matrix,
    prepare_pca,
    read_pca_rows,
    read_snapshots,
    row_block,
    write_pca_files,
)
from .descent import DimReduce, LineSearch

__all__ = [
    "DimReduce",
    "LineSearch",
    "WeightSnapshots",
    "pca_matrix",
    "prepare_pca",
    "read_pca_rows",
    "read_snapshots",
    "row_block",
    "write_pca_files",
]
