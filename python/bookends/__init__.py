"""Bookends: the first and the last layer of a language model.

The functions here take arrays of torch, cupy, jax and, if the library was built for the CPU device, numpy; everything
with DLPack or an array interface. A call launches kernels on the current stream of the arrays' library and returns.
Wrong arguments raise ValueError or TypeError and start nothing. `bookends.torch` has differentiable operators.
"""

from ._arrays import Status
from ._config import __version__, show_config
from ._functions import (BagGradients, Classified, HeadResult, LmHead, Transposed, classifier_fused, classifier_totals,
                         embedding_bag, embedding_bag_backward, embedding_bag_backward_workspace_bytes,
                         embedding_lookup, embedding_optimizer, embedding_transpose,
                         embedding_transpose_workspace_bytes, embedding_update, embedding_update_workspace_bytes,
                         encoder_backward, encoder_backward_workspace_bytes, encoder_forward, error_string,
                         last_message, scale, version)
from ._library import ArgumentError, BadIdError, BookendsError, DeviceError, UnsupportedError, WorkspaceError

__all__ = ["ArgumentError", "BadIdError", "BagGradients", "BookendsError", "Classified", "DeviceError", "HeadResult",
           "LmHead", "Status", "Transposed", "UnsupportedError", "WorkspaceError", "__version__", "classifier_fused",
           "classifier_totals", "embedding_bag", "embedding_bag_backward", "embedding_bag_backward_workspace_bytes",
           "embedding_lookup", "embedding_optimizer", "embedding_transpose", "embedding_transpose_workspace_bytes",
           "embedding_update", "embedding_update_workspace_bytes", "encoder_backward",
           "encoder_backward_workspace_bytes", "encoder_forward", "error_string", "last_message", "scale",
           "show_config", "version"]
