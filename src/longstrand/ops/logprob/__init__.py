"""Log-probabilities of the next tokens, without a [T, vocabulary] matrix."""

from longstrand.ops.logprob.chunked import token_logprobs
from longstrand.ops.logprob.reference import token_logprobs_reference

__all__ = ["token_logprobs", "token_logprobs_reference"]
