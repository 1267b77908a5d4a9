"""CPU kernels: compiled by numba on first use, cached on disk, computing in float32.

Activations are torch tensors in bfloat16 or float32; :class:`StepLayout` says where the tokens
of a packed step live in the paged pool. :mod:`reference` defines every kernel in plain torch.
"""

from .activation import silu_mul as silu_mul
from .attention import paged_attention as paged_attention
from .layout import StepLayout as StepLayout
from .norm import add_rms_norm as add_rms_norm
from .norm import rms_norm as rms_norm
from .rotary import rotary_store as rotary_store
from .store import store_kv as store_kv
