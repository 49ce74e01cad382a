"""What rows are: as they are given, and as a slot keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hidden_cache._native import Element

ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.float16: Element.FLOAT16,
    torch.bfloat16: Element.BFLOAT16,
}
FLOAT8 = torch.float8_e4m3fn
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows as a slot keeps them.

    Attributes:
        dtype: of an element.
        hidden: elements of a row.
        scaled: float8 made from something wider, with one float32 scale a row behind the rows.
    """

    dtype: torch.dtype
    hidden: int
    scaled: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its scale."""
        return self.hidden * self.dtype.itemsize

    @property
    def own_dtype(self) -> torch.dtype:
        """What the rows are given as where nobody asks for another dtype."""
        return torch.float32 if self.scaled else self.dtype

    def slot_bytes(self, chunk_size: int) -> int:
        """Bytes of a slot for one layer of one chunk."""
        rows = chunk_size * self.row_bytes
        if not self.scaled:
            return rows
        return -(-rows // SCALE_BYTES) * SCALE_BYTES + chunk_size * SCALE_BYTES

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether rows are converted to `dtype`, or are of it, as they are copied."""
        if self.scaled:
            return dtype in ELEMENTS
        return dtype == self.dtype or (dtype in ELEMENTS and self.dtype in ELEMENTS)

    def copied_as(self, dtype: torch.dtype | None) -> torch.dtype:
        """What rows are copied as on the way to `dtype`, None for their own."""
        return dtype if dtype is not None and self.converts(dtype) else self.own_dtype

    def elements(self, other: torch.dtype) -> tuple[Element, Element]:
        """For a move between rows of `other` and slots: elements there, elements in the slots."""
        if other == self.dtype and not self.scaled:
            return Element.ANY, Element.ANY
        return ELEMENTS[other], Element.FLOAT8 if self.scaled else ELEMENTS[self.dtype]

    def __str__(self) -> str:
        return f"{self.hidden} x {self.dtype}" + (" with scales" if self.scaled else "")


def format_for(dtype: torch.dtype, hidden: int, storage_dtype: str) -> RowFormat:
    """How rows of `dtype` are kept where `storage_dtype` is asked for; "" keeps them as they are.

    Only float32, float16 and bfloat16 are converted; everything else is kept as it is.
    """
    if storage_dtype and dtype in ELEMENTS:
        if storage_dtype == "float8":
            return RowFormat(FLOAT8, hidden, scaled=True)
        return RowFormat(getattr(torch, storage_dtype), hidden)
    return RowFormat(dtype, hidden)
