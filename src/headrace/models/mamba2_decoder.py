"""The decoder of families whose recurrent layers are Mamba-2, and what its kernels ask of sizes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from headrace.models.decoder import Config, ConvolvedDecoder
from headrace.models.layers.attention_plan import head_obstacle
from headrace.models.layers.mamba2 import mamba2

if TYPE_CHECKING:
    from headrace.models.layers.mamba2 import Mamba2Sizes


class Mamba2Decoder(ConvolvedDecoder[Config]):
    """A decoder with Mamba-2 layers; its config has their sizes as `mamba`."""

    _mixer = staticmethod(mamba2)

    @property
    @abstractmethod
    def _sizes(self) -> Mamba2Sizes:
        """Sizes of the Mamba-2 layers."""

    @property
    def _mixed_width(self) -> int:
        return self._sizes.inner

    @staticmethod
    def kernel_obstacle(config: Any) -> str | None:  # noqa: ANN401 - the family's config
        """Return why the kernels cannot run a model, or None if they can."""
        obstacle: str | None = config.mamba.kernel_obstacle
        if obstacle is None and config.attention_layers:
            return head_obstacle(config)
        return obstacle
