"""The short causal convolution before a linear-attention layer."""

from longstrand.ops.short_conv.reference import short_conv_reference
from longstrand.ops.short_conv.step import short_conv_step
from longstrand.ops.short_conv.taps import short_conv

__all__ = ["short_conv", "short_conv_reference", "short_conv_step"]
