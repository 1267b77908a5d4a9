"""Loading: model folders, GGUF files, the hub cache and tokenizers. Worker threads only."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import open_checkpoint as open_checkpoint
