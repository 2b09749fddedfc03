"""Embedding and losses for PyTorch: differentiable, compilable, with torch's signatures.

Tensors are on the GPU, or on the CPU if the library was built for the CPU device.
"""

from ._functional import Embedding, EmbeddingBag, cross_entropy, embedding, embedding_bag, linear_cross_entropy
from ._patch import patch, unpatch

__all__ = ["Embedding", "EmbeddingBag", "cross_entropy", "embedding", "embedding_bag", "linear_cross_entropy", "patch",
           "unpatch"]
