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
# One function in torch, made of listed operators in MindSpore's functional interface: cross_entropy is log_softmax and
# nll_loss, logsumexp is exp, sum and log. (MindSpore's lists name no cross-entropy as such, so its fused operator runs
# in the dtype of its input, where the sum over a batch overflows.)
AUTO_MADE_OF_WIDE = frozenset(
    words(
        """cross_entropy logsumexp logcumsumexp logaddexp logaddexp2 cosine_similarity cosine_embedding_loss
        pairwise_distance dist poisson_nll_loss gaussian_nll_loss triplet_margin_with_distance_loss
        multilabel_soft_margin_loss rms_norm nansum"""
    )
)
# torch's own names for a dot product, and operations of which torch has a form for equal dtypes only
AUTO_WIDEST = frozenset(
    words(
        """addcdiv addcmul cross dot grid_sample cat vdot vecdot inner bilinear lerp scatter scatter_add index_add
        index_copy index_put masked_scatter"""
    )
)
