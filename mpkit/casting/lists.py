"""The lists of MindSpore's levels, in torch's names.

Source:  MindSpore 2.7 amp (white and black list, the three lists of level auto).
"""

from __future__ import annotations

from torch import nn

from mpkit.casting.operations import words

WHITE_MODULES: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    nn.LSTMCell,
    nn.RNNCell,
    nn.GRUCell,
)
CONVOLUTIONS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
WHITE_OPERATORS = (*CONVOLUTIONS, "matmul", "mm", "bmm", "prelu", "relu", "outer")
BLACK_MODULES: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)

# attention, tensordot and multi_dot are one kernel of listed products each in torch
AUTO_TO_LOW = frozenset(
    (
        *CONVOLUTIONS,
        *words("""matmul mm bmm prelu einsum linear addmm addbmm addmv baddbmm mv scaled_dot_product_attention
        tensordot multi_dot"""),
    )
)
AUTO_TO_WIDE = frozenset(
    words(
        """pow acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan softplus layer_norm
    batch_norm group_norm norm kl_div smooth_l1_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits pdist cdist renorm prod softmax log_softmax cumprod
    cumsum sum l1_loss mse_loss nll_loss"""
    )
)
AUTO_WIDEST = frozenset(words("addcdiv addcmul cross dot grid_sample cat"))
