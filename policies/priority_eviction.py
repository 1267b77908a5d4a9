"""Prefixes of less important requests first."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..policy import PrefixView


@dataclass(eq=False)
class PriorityEviction:
    """Least recently used, where every class is worth ``class_steps`` steps: a higher one counts as used later.

    The class is that of the request that used the prefix last (lower numbers are higher classes), as
    in SGLang's ``priority`` eviction and vllm-project/vllm 47802; there a prefix of the highest class
    stays for ever, here an advantage ages away.

    Not for traffic of one class: it is then a plain ``lru``.

    Args:
        class_steps: Steps that a prefix is kept longer than one of the next lower class.
        classes: Classes beyond this number on either side of 0 count as the last.
    """

    api_version = 1
    class_steps: int = 512
    classes: int = 8

    def __post_init__(self) -> None:
        if self.class_steps < 1 or self.classes < 1:
            raise ConfigError("priority eviction: class_steps and classes must be at least 1")

    def key(self, prefix: PrefixView) -> tuple[int, int]:
        """Step of the last hit as if it had been of class 0, then depth (deeper is smaller)."""
        category = max(-self.classes, min(self.classes, prefix.priority))
        return prefix.last_used - category * self.class_steps, -prefix.depth
