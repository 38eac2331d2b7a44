"""The lists of MindSpore, torch, apex and Keras side by side, in torch's names.

Each framework says which operators compute low, which in float32 (wide), which in what their inputs promote to, and
which modules stay float32.

Source:   MindSpore 2.7 amp; torch 2.13, ATen/autocast_mode.h; NVIDIA apex, amp/lists and amp/wrap.py; Keras 3 dtype
          policies.
Checked:  MindSpore's levels O0 to O3 against its recorded results; of its level auto the order of dispatch was seen and
          the lists were read. torch's on every sample of PyTorch's operator database against the dtypes that CUDA's
          dispatcher gives for fake tensors. Of apex and Keras the lists were read; their casts were not run.
"""

from __future__ import annotations

from torch import Tensor, nn

from mpkit.casting.operators import words

# --- MindSpore --------------------------------------------------------------------------------------------------------

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
        multilabel_soft_margin_loss rms_norm nansum huber_loss hinge_embedding_loss margin_ranking_loss"""
    )
)
# torch's own names for a dot product, and operations of which torch has a form for equal dtypes only
AUTO_PROMOTED = frozenset(
    words(
        """addcdiv addcmul cross dot grid_sample cat vdot vecdot inner bilinear lerp scatter scatter_add scatter_reduce
        index_add index_copy index_put index_reduce put masked_scatter meshgrid cartesian_prod heaviside isclose
        allclose binary_cross_entropy embedding_bag complex polar solve lstsq"""
    )
)
# written into a tensor of another dtype, what is written takes that
AUTO_WRITTEN = frozenset(f"{name}_" for name in AUTO_PROMOTED if hasattr(Tensor, f"{name}_"))

# --- torch.autocast on CUDA -------------------------------------------------------------------------------------------

TORCH_TO_LOW = frozenset(
    (
        *CONVOLUTIONS,
        *words("matmul mm bmm addmm addmv addr addbmm baddbmm mv einsum multi_dot vecdot linear prelu conv_tbc"),
        *words("scaled_dot_product_attention"),
    )
)
TORCH_TO_WIDE = frozenset(
    words(
        """acos asin cosh tan erfinv exp expm1 log log10 log1p log2 pow square reciprocal rsqrt sinh softplus softmax
        log_softmax logsumexp sum sum_to_size prod cumsum cumprod norm nuclear_norm frobenius_norm dist cdist pdist
        renorm layer_norm native_layer_norm group_norm rms_norm nll_loss l1_loss mse_loss smooth_l1_loss huber_loss
        kl_div binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy
        hinge_embedding_loss margin_ranking_loss multilabel_margin_loss multi_margin_loss soft_margin_loss
        triplet_margin_loss poisson_nll_loss pairwise_distance trapz trapezoid cumulative_trapezoid"""
    )
)
TORCH_PROMOTED = frozenset(
    words("addcdiv addcmul atan2 cross dot tensordot inner scatter_add index_put grid_sample grid_sampler bilinear")
)

# listed too; whoever calls one of these kernels does so by a private name of torch's
TORCH_KERNELS_TO_LOW = words(
    "convolution _convolution _scaled_dot_product_flash_attention _thnn_fused_lstm_cell _thnn_fused_gru_cell"
)
TORCH_KERNELS_TO_WIDE = words(
    """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa nll_loss2d"""
)

# --- apex O1 and O2 ---------------------------------------------------------------------------------------------------

APEX_TO_LOW = frozenset(
    (*CONVOLUTIONS, *words("matmul mm bmm addmm addmv addr addbmm baddbmm mv linear prelu conv_tbc"))
)
APEX_TO_WIDE = frozenset(
    words(
        """acos asin cosh tan erfinv exp expm1 log log10 log2 pow reciprocal rsqrt sinh cumprod cumsum dist norm prod
        std sum var renorm interpolate grid_sample softplus softmin softmax log_softmax gelu layer_norm group_norm
        local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
        cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
        multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss
        soft_margin_loss triplet_margin_loss ctc_loss cpu"""
    )
)
APEX_PROMOTED = frozenset(
    words("addcdiv addcmul atan2 cross bilinear dot add sub mul div eq ne lt le gt ge equal cat stack")
)
BANNED = "binary_cross_entropy"
# products and writes on none of apex's lists (its last version with amp), for which torch wants one dtype
APEX_UNLISTED = words(
    """einsum scaled_dot_product_attention tensordot inner vecdot multi_dot cdist lerp index_add index_add_ index_copy
    index_copy_ index_put index_put_ scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_
    masked_scatter masked_scatter_"""
)

# --- Keras ------------------------------------------------------------------------------------------------------------

BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS: tuple[type[nn.Module], ...] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
KERAS_PROTECTED = (*BATCH_NORMS, *INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm)
